"""The start of a worker on this node: its descriptors, its environment, its segments, its scratch folder."""

from __future__ import annotations

import os
import socket
import tempfile

from megatron.elastic.control import env
from megatron.elastic.control.slot import Slot
from megatron.elastic.launch.agent.rendezvous import JobMembers
from megatron.elastic.launch.arguments import JobSpec
from megatron.elastic.launch.workers.logs import WorkerLogs
from megatron.elastic.launch.workers.pool import Pool, Worker
from megatron.elastic.launch.workers.processes import sweep_scratches, sweep_segments
from megatron.elastic.launch.workers.zygote_messages import WorkerSpec
from megatron.elastic.platform.visible_devices import number_on_machine

__all__ = ["Spawner"]

_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


class Spawner:
    """Starts workers through ``pool`` with torchrun's environment and ours."""

    def __init__(self, job: JobSpec, members: JobMembers, pool: Pool, logs: WorkerLogs) -> None:
        self._job, self._members, self._pool, self._logs = job, members, pool, logs
        self._node = members.nodes[members.node]
        self._slots = sum(len(node.ranks) for node in members.nodes.values())
        self._count = 0
        tag = members.signer.sign("segments", job.run_id.encode())[:12].decode()
        self._prefix = f"mel-{tag}-{members.node}-"
        self._scratch: str | None = None

    def start(self, rank: int, incarnation: int, newcomer: bool, ended_in: int = -1) -> Worker:
        """Have the zygote fork ``rank`` in its ``incarnation``; returns before it runs.

        ``newcomer``: the job runs already, so the worker will have to be admitted. ``ended_in``: of
        :class:`~megatron.elastic.control.history.JobHistory`.
        """
        self._count += 1
        job = self._job
        mine, theirs = socket.socketpair()
        slot_fd, slot = Slot.create(f"elastic-slot-{rank}")
        worker = Worker(self._count, rank, rank - self._node.ranks[0], incarnation, mine, slot)
        life = {env.NEWCOMER: str(int(newcomer)), env.ENDED_IN: str(ended_in), env.SCRATCH: self._scratch_of(worker)}
        environ = self._environ(worker) | life
        spec = WorkerSpec.of(self._count, job.kind, job.target, job.arguments, environ, job.adapt)
        out, err = self._logs.open(worker.local_rank)
        self._pool.fork(spec, worker, slot_fd, theirs, out, err)
        return worker

    def _environ(self, worker: Worker) -> dict[str, str]:
        job, world = self._job, str(self._members.nominal)
        environ = {
            "RANK": str(worker.rank),
            "GROUP_RANK": str(self._members.node),
            "ROLE_RANK": str(worker.rank),
            "ROLE_NAME": job.role,
            "LOCAL_WORLD_SIZE": str(len(self._node.ranks)),
            "WORLD_SIZE": world,
            "GROUP_WORLD_SIZE": str(len(self._members.nodes)),
            "ROLE_WORLD_SIZE": world,
            "MASTER_ADDR": self._members.master_addr,
            "MASTER_PORT": str(self._members.master_port),
            # torch prefixes the default group's keys in the agent's store with it.
            "TORCHELASTIC_RESTART_COUNT": str(worker.incarnation),
            "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
            "TORCHELASTIC_RUN_ID": job.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(self._members.store.embedded and not job.elastic),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(job.signals),
            "TORCHELASTIC_ERROR_FILE": self._logs.error_files.get(worker.local_rank, ""),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            env.SECRET: job.secret,
            env.STORE: self._members.store_place,
            env.RUN_ID: job.run_id,
            env.SLOTS: str(self._slots),
            env.INCARNATION: str(worker.incarnation),
            env.HOST: self._node.host,
            env.DOMAIN: job.domain,
            env.ADDRESS: self._members.address,
            env.NODE: str(self._members.node),
            env.POSITION: str(worker.local_rank),
            env.DRAIN_SIGNALS: ",".join(job.signals) if job.elastic else "",
            env.SEGMENT_PREFIX: self._prefix,
        }
        environ.update(self._local_rank(worker.local_rank))
        return environ

    def _local_rank(self, local_rank: int) -> dict[str, str]:
        if not self._job.virtual_local_rank:
            return {"LOCAL_RANK": str(local_rank)}
        return {"LOCAL_RANK": "0", **{name: number_on_machine(local_rank, name) for name in _VISIBLE_DEVICES}}

    def _scratch_of(self, worker: Worker) -> str:
        """The scratch folder for a worker, below that of this node; empty when none can be made."""
        if self._scratch is None:
            try:
                self._scratch = tempfile.mkdtemp(prefix="mel-")
            except OSError:
                return ""  # multiprocessing raises an error if the program needs it
        return os.path.join(self._scratch, str(worker.number))

    def sweep(self, all_of_node: bool) -> None:
        """Remove what this agent's workers left in their scratch folders, and this node's in /dev/shm.

        ``all_of_node``: False where another agent holds the node's place and its workers may use what is there.
        """
        if all_of_node:
            sweep_segments(self._prefix)
        if self._scratch is not None:
            sweep_scratches(self._scratch)
