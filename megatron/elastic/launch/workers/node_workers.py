"""The workers of one node by rank: started through the spawner, killed through the pool."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.membership import Activity
from megatron.elastic.launch.workers.pool import Pool, Worker
from megatron.elastic.launch.workers.spawn import Spawner

__all__ = ["NodeWorkers"]


@dataclass
class NodeWorkers:
    """Implements :class:`megatron.elastic.launch.agent.respawn.Processes`."""

    pool: Pool
    spawner: Spawner
    history: JobHistory
    by_rank: dict[int, Worker] = field(default_factory=dict)
    """The newest worker of each rank that has one which has not ended."""

    def running(self) -> Collection[int]:
        """See :class:`Processes`."""
        return tuple(self.by_rank)

    def remains(self, rank: int) -> bool:
        """See :class:`Processes`."""
        return self.pool.keeps(rank)

    def lease_left(self) -> float:
        """See :class:`Processes`."""
        return self.pool.lease_left()

    def start(self, rank: int, incarnation: int, newcomer: bool) -> None:
        """See :class:`Processes`."""
        self.by_rank[rank] = self.spawner.start(rank, incarnation, newcomer, self.history.ended_in)

    def kill(self, rank: int, why: str) -> bool:
        """See :class:`Processes`."""
        worker = self.by_rank[rank]
        first = worker.killed_for is None
        self.pool.kill(worker, why)
        return first

    def activity(self, rank: int) -> Activity:
        """See :class:`Processes`."""
        return self.by_rank[rank].slot.look().activity
