"""The run of one launcher: from its command line to its exit code."""

from __future__ import annotations

import os
import signal

from megatron.elastic.config import ConfigError
from megatron.elastic.control import env
from megatron.elastic.control.exits import ExitCode
from megatron.elastic.control.store import StoreLost
from megatron.elastic.launch.agent.agent import Agent
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.agent.node_conditions import refuse_unfit
from megatron.elastic.launch.agent.rendezvous import meet
from megatron.elastic.launch.agent.starting import Starting
from megatron.elastic.launch.arguments import BadCommand, JobSpec, parse
from megatron.elastic.launch.check import check
from megatron.elastic.launch.early_signals import EarlySignals
from megatron.elastic.launch.limits import raise_file_limit
from megatron.elastic.launch.messages import CONSOLE
from megatron.elastic.launch.workers.pool import Pool, PoolEvents
from megatron.elastic.launch.workers.processes import name_process
from megatron.elastic.launch.workers.zygote_process import ZygoteProcess, may_fork

__all__ = ["run"]


def run(argv: list[str], signals: EarlySignals, threads_given: bool) -> int:
    """Return the exit code of the launcher with these arguments, at the end of the job.

    ``threads_given``: the user has set ``OMP_NUM_THREADS``.
    """
    loop: Loop | None = None
    pool: Pool | None = None
    try:
        job = parse(argv)
        os.environ.pop(env.WEBHOOK, None)  # it may hold a token, and a script may log its environment
        signals.handle(job.signals)
        name_process("elastic-agent")
        raise_file_limit(job.nodes, job.workers)
        if job.check:
            signals.release()
            return check(job)
        refuse_unfit(job.settings)
        # First of all: a fork also copies whatever else is open.
        zygote = _start_zygote(job, threads_given)
        signals.kill = zygote.kill
        CONSOLE.write_apart()
        agents: list[Agent] = []
        events = PoolEvents(
            said=lambda worker, message: agents[0].said(worker, message),
            ended=lambda worker, status: agents[0].ended(worker, status),
            zygote_lost=lambda ready: agents[0].zygote_lost(ready),
        )
        loop = Loop()
        pool = Pool(loop, job.preload, events, zygote)
        starting = Starting(job)
        agents.append(Agent(job, loop, pool, meet(job, starting)))
        starting.close()
        return agents[0].run()
    except (BadCommand, ConfigError) as error:
        CONSOLE.put(f"error: {error}\n")
        return 1
    except StoreLost as error:
        CONSOLE.put(f"error: {error}, before the job had started: start it again\n")
        return ExitCode.STATE_LOST
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if pool is not None:
            pool.close()
        if loop is not None:
            loop.close()
        CONSOLE.flush()


def _start_zygote(job: JobSpec, threads_given: bool) -> ZygoteProcess:
    """The parent of this node's workers."""
    uses_all_cores = job.workers == 1 and not threads_given  # as torchrun has it
    if uses_all_cores:
        del os.environ["OMP_NUM_THREADS"]
    start = ZygoteProcess.fork if may_fork() and not uses_all_cores else ZygoteProcess.execute
    return start(job.preload)
