"""All process groups of one process, edited together.

A :class:`Fabric` owns the links of this process and every
``torch.distributed`` group that runs over them. It is connected once, then
edited at each generation: groups keep their object identity, dead members drop
out, joiners come in. Two implementations: ``native`` (links edited in place,
``csrc/comm``) and ``gloo`` (everything rebuilt, the baseline).

Invariants
- ``rank`` numbers are global slots, never renumbered. A group is an ordered
  member list fixed when it was made; its *living* members (those of the present
  generation, in that order) take part in collectives.
- Before the first edit (generation 0) a fabric is a world of one: ranks and sizes
  of groups are the nominal ones, and collectives complete with this process
  alone. A joiner builds its model in that state and is then edited in.
- All waits end: in completion, ``PeerLost``, ``CommTimeout``, or, after
  :meth:`Fabric.interrupt`, ``GenerationChanged``.
- Group names are (role, members): never a process-local counter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.elastic.comm.address import Address
from megatron.elastic.comm.limbs import limbs_of, of_limbs
from megatron.elastic.comm.side_channel import SideChannel
from megatron.elastic.comm.transfers import PostedTransfers, Transfers

__all__ = ["BlockRange", "EditReport", "Fabric"]


@dataclass(frozen=True)
class BlockRange:
    """Elements ``[start, stop)`` of a flat tensor, owned by ``owner`` (a global rank)."""

    start: int
    stop: int
    owner: int


@dataclass(frozen=True)
class EditReport:
    """The report of one edit: seconds by phase, and counts."""

    generation: int
    seconds: Mapping[str, float]
    groups: int
    links_opened: int
    links_dropped: int
    links_ahead: int = 0
    """Links that had been opened before the edit began (:meth:`Fabric.prepare`)."""


class Fabric(ABC):
    """See the module docstring. ``slots`` is the nominal world size W; ``timeout`` (s) bounds every wait."""

    rank: int
    slots: int
    generation: int
    timeout: float

    @abstractmethod
    def address(self) -> Address:
        """Where peers can reach this process; listening already when this returns."""

    @abstractmethod
    def edit(self, generation: int, members: Mapping[int, Address], timeout: float) -> EditReport:
        """Make ``members`` (rank → address, this process included) the living ones.

        The first call connects. Every member calls it with the same arguments.
        Afterwards each existing group holds its living members only, and
        collectives of ``generation`` can run. Raises ``GenerationChanged`` when
        interrupted for a newer one, ``CommTimeout``, ``PeerLost``.
        """

    def prepare(self, members: Mapping[int, Address], timeout: float) -> int:
        """Open links to ``members`` ahead of the edit that may admit this process; how many stand now.

        For a spare or a newcomer while the members train, undisturbed. Never
        raises for a peer that does not answer: the edit opens the rest. Ended early
        by :meth:`interrupt` and :meth:`edit`. A fabric that cannot opens none.
        """
        return 0

    @abstractmethod
    def interrupt(self, generation: int) -> None:
        """Wake every wait of older generations with ``GenerationChanged(generation)``.

        Callable from any thread, at any time, also before the first edit; returns
        at once. Work begun afterwards fails likewise until :meth:`edit` reaches
        ``generation``.
        """

    @property
    @abstractmethod
    def alive(self) -> tuple[int, ...]:
        """Living ranks of the present generation, ascending."""

    @property
    @abstractmethod
    def world(self) -> dist.ProcessGroup:
        """The default group: the slot space. Collectives on it run over the living."""

    @abstractmethod
    def group(self, role: str, members: Sequence[int]) -> dist.ProcessGroup:
        """The group of ``members`` (ordered) in ``role``; made on first use, the same object after.

        Purely local: no rank outside ``members`` need call it, and no two members
        wait for each other here. Usable with torch.distributed's functions.
        """

    @abstractmethod
    def release(self, role_prefix: str) -> None:
        """Forget groups whose role starts with ``role_prefix`` (made for an older plan)."""

    def transfers(self, group: dist.ProcessGroup, tag: int) -> Transfers:
        """Return messages of this generation under ``tag``, which nothing else on ``group`` uses meanwhile."""
        return PostedTransfers(group, tag)

    def sum_over_ranks(self, values: Sequence[float], counts: Sequence[int]) -> tuple[list[float], list[int]]:
        """Return the sums over all living ranks of ``values``, in fp64, and of ``counts``, exactly.

        ``counts``: natural numbers whose sums are below 2^95. There are as many of each on every rank, and one at
        least. Raises ``CommError``.
        """
        limbs = [limb for count in counts for limb in limbs_of(count)]
        total = torch.tensor([*values, *limbs], dtype=torch.float64)
        dist.all_reduce(total, group=self.world)
        sums = total.tolist()
        each = iter(sums[len(values) :])
        return sums[: len(values)], [of_limbs(*limbs) for limbs in zip(each, each, each, strict=True)]

    def lendable(self, count: int) -> torch.Tensor:
        """Return host memory for ``count`` fp32 values, for messages that peers on this host may then leave there."""
        return torch.zeros(count)

    def on_loan(self, address: int) -> bool:
        """Return whether a peer has a message that was sent from the lendable memory at ``address``."""
        return False

    @abstractmethod
    def reduce_scatter_blocks(self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        """Sum ``flat`` (1-D) over ``group`` in member order; each owner's ranges receive the sum in place.

        Ranges this rank does not own are left unspecified.
        """

    @abstractmethod
    def all_gather_blocks(self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        """Fill every range of ``flat`` (1-D) from its owner, in place."""

    @abstractmethod
    def begin_reduce_scatter_blocks(
        self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]
    ) -> dist.Work:
        """Begin :meth:`reduce_scatter_blocks` and return at once: it goes on while this process computes.

        Only the work that is returned reads and writes ``flat`` until its ``wait``, which raises the errors. What is
        begun on a group runs in that order; all members begin it alike. An interruption ends it, and after the edit
        that follows it touches ``flat`` no more. Until a thread waits for it, it is no wait of this process.
        """

    @abstractmethod
    def begin_all_gather_blocks(
        self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]
    ) -> dist.Work:
        """Begin :meth:`all_gather_blocks`, like :meth:`begin_reduce_scatter_blocks`."""

    def begins_at_once(self, group: dist.ProcessGroup) -> bool:
        """Return whether nothing that ``group`` begins now would first wait for its members; equal on all of them."""
        return True

    def writes_values_only(self) -> bool:
        """Return whether a gather of blocks writes nothing into ``flat`` but its result.

        If so, a member that has the result already may read it meanwhile.
        """
        return True

    def unfinished(self) -> bool:
        """Return whether an operation of this generation is not done, though its call has returned.

        A fabric that enqueues on a device returns before. If an interruption then ends the operation, it has no result
        and no call raises: this is True from then on, until an edit. So a rank that reports what it has done must ask.
        It is also True while an operation is under way, which an interruption may end next.
        """
        return False

    def cut_off_by(self) -> int:
        """Return the generation whose interruption ended operations of this one before they were done; 0 if none did.

        What these operations were to write is undefined from then on, and so is what is computed with it, until an
        edit. An error of such a computation may be due to that.
        """
        return 0

    @abstractmethod
    def waiting_for(self) -> tuple[int, ...]:
        """Ranks whose message this process is blocked on now (for hang detection)."""

    @abstractmethod
    def side_channel(self, number: int) -> SideChannel:
        """Messages beside the steps of this generation; ``number`` tells its channels apart, the same on every rank."""

    @abstractmethod
    def close(self) -> None:
        """Close links, remove segments. Idempotent."""
