"""``--elastic-check`` under the launcher: one process of the job, alone, up to the end of its checks.

It has the environment of the job's rank 0, so sizes are judged by the ranks of the whole job. There is no
membership, no store and no other node; the adaptor ends the script when its arguments are validated.
"""

from __future__ import annotations

import os
import subprocess
import sys

from megatron.elastic.config import ConfigError
from megatron.elastic.control import env
from megatron.elastic.control.slot import Slot
from megatron.elastic.launch.agent.node_conditions import refuse_unfit
from megatron.elastic.launch.arguments import BadCommand, JobSpec
from megatron.elastic.launch.workers.worker import run_script
from megatron.elastic.launch.workers.zygote_messages import WorkerSpec

__all__ = ["check"]


def check(job: JobSpec) -> int:
    """Run the script as rank 0 of ``job`` would; returns its exit status, 1 where the launcher refuses the job."""
    refusals = [text for text in (job.refused, _unfit(job)) if text]
    code = _run(job, refused=bool(refusals))
    for text in refusals:
        print(f"error: {text}", file=sys.stderr, flush=True)
    return code or int(bool(refusals))


def _unfit(job: JobSpec) -> str:
    """Return why this machine would be refused as a node of the job; empty if it would not."""
    try:
        refuse_unfit(job.settings)
    except (BadCommand, ConfigError) as error:
        return str(error)
    return ""


def _run(job: JobSpec, refused: bool) -> int:
    nominal = job.least * job.workers - job.settings.spares
    environ = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(nominal),
        "LOCAL_WORLD_SIZE": str(job.workers),
        "MASTER_ADDR": job.master_addr,
        "MASTER_PORT": str(job.master_port),
        env.RUN_ID: job.run_id,
        env.SLOTS: str(job.nodes * job.workers),
        env.INCARNATION: "0",
        env.NODE: "0",
        env.REFUSED: str(int(refused)),
    }
    if job.kind == "program":
        return subprocess.run([job.target, *job.arguments], env={**os.environ, **environ}, check=False).returncode
    os.environ.update(environ)
    descriptor, slot = Slot.create("elastic-check")
    try:
        return run_script(WorkerSpec.of(0, job.kind, job.target, job.arguments, environ, job.adapt), descriptor)
    finally:
        slot.close()
