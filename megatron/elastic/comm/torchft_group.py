"""torchft's process group over our links: a quorum that changes costs one edit, not a rebuild of all connections.

    manager = torchft.Manager(pg=ProcessGroupElastic(timeout=timedelta(seconds=10)), ...)

torchft calls ``configure`` with each new quorum; :mod:`megatron.elastic.comm.quorum` does the rest. This is the only
module that imports torchft, and no other module of the package imports it.
"""

from __future__ import annotations

from datetime import timedelta

from torchft.process_group import ProcessGroupWrapper, create_store_client

from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.native import NativeGroup
from megatron.elastic.comm.quorum import QuorumLinks

__all__ = ["ProcessGroupElastic"]


class ProcessGroupElastic(ProcessGroupWrapper):  # type: ignore[misc]
    """A process group that torchft's manager reconfigures.

    ``timeout`` bounds a reconfiguration and each operation. ``host`` and ``slots`` are those of
    :class:`~megatron.elastic.comm.quorum.QuorumLinks`. Tensors of a device travel through host memory.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), *, host: str | None = None, slots: int = 64) -> None:
        super().__init__(timeout)
        self._links = QuorumLinks(host, slots)
        self._aborted = False

    def getBackendName(self) -> str:
        return "torchft-elastic"

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Make this process rank ``rank`` of a quorum of ``world_size``. Raises what ``QuorumLinks.meet`` does."""
        self._replica_id, self._rank, self._quorum_id = replica_id, rank, quorum_id
        self._group_rank, self._group_world_size, self._global_ranks = group_rank, group_world_size, global_ranks
        self._pg = None
        store = create_store_client(store_addr, timeout=self._timeout)
        self._pg = self._links.meet(store, rank, world_size, self._timeout.total_seconds())
        self._aborted = False

    def abort(self, errored: bool = True) -> None:
        """End pending operations in this process; all later ones fail until ``configure``."""
        super().abort(errored)
        self._links.interrupt()
        self._aborted = errored

    def errored(self) -> Exception | None:
        """The error for which the group has to be configured again, if any."""
        failed = isinstance(self._pg, NativeGroup) and self._pg.failed()
        if self._aborted or failed:
            return CommError("the group was aborted, or a collective of this quorum failed")
        return None

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def shutdown(self) -> None:
        """End links and threads."""
        super().shutdown()
        self._links.close()
