"""``python -m megatron.elastic.launch [torchrun arguments] script.py [script arguments]``.

Like torchrun, but the loss of a worker ends neither the others nor the job. See
``--help`` and docs/; exit codes: 0 done, 1 bad input, 3 drained and saved: requeue,
4 state lost, 5 deterministic failure: do not requeue.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Run one node's agent to the end of the job."""
    # OpenMP reads it when torch is loaded, and a zygote forked from here loads no torch of its own.
    threads_given = "OMP_NUM_THREADS" in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from megatron.elastic.config import ConfigError
    from megatron.elastic.control import env
    from megatron.elastic.launch.agent.agent import Agent
    from megatron.elastic.launch.agent.loop import Loop
    from megatron.elastic.launch.agent.node_conditions import finding_at_start
    from megatron.elastic.launch.agent.rendezvous import meet
    from megatron.elastic.launch.agent.starting import Starting
    from megatron.elastic.launch.arguments import BadCommand, parse
    from megatron.elastic.launch.limits import raise_file_limit
    from megatron.elastic.launch.workers.pool import Pool, PoolEvents
    from megatron.elastic.launch.workers.processes import name_process
    from megatron.elastic.launch.workers.zygote_process import ZygoteProcess, may_fork

    loop: Loop | None = None
    pool: Pool | None = None
    try:
        job = parse(argv)
        os.environ.pop(env.WEBHOOK, None)  # it may hold a token, and a script may log its environment
        name_process("elastic-agent")
        raise_file_limit(job.nodes, job.workers)
        if job.check:
            from megatron.elastic.launch.check import check

            return check(job)
        unfit = finding_at_start(job.settings)
        if unfit:
            raise BadCommand(f"this node is not fit (--elastic-health): {unfit}; mend it, or leave that check out")
        uses_all_cores = job.workers == 1 and not threads_given  # as torchrun has it
        if uses_all_cores:
            del os.environ["OMP_NUM_THREADS"]
        # First of all: a fork also copies whatever else is open.
        start = ZygoteProcess.fork if may_fork() and not uses_all_cores else ZygoteProcess.execute
        zygote = start(job.preload)
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
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if pool is not None:
            pool.close()
        if loop is not None:
            loop.close()


if __name__ == "__main__":
    # _exit: daemon threads may wait in the store, and nothing is left to flush but these two.
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
