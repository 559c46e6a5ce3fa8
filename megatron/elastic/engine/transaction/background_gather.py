"""The gather of one version's parameters, beside the next forward (docs/design.md §3.8).

After the update every rank begins the gathers of all its buckets, in one order, before it computes anything. The
forward then waits before each unit for the buckets of that unit alone. Since every rank begins all gathers first, no
such wait is one for a forward of another rank.

Until all units are there, this rank's parameters count as those of the version before (``Context.parameters``),
and the arena as not filled. After a loss in between the survivors gather them again, and nothing is computed with a
mixture (rule 31). Whatever else reads parameters first waits for all of them (:meth:`BackgroundGather.complete`).

A rank may take part only for others, which lack the parameters that it has: newcomers. What it receives is what it
has, so its forward does not wait. That holds until the gather is cut off: a thread that copies out of a peer's memory
may still do so when the peer has put something else there, before the edit waits for the thread. So unless all had
arrived, this rank has no parameters then (:meth:`BackgroundGather.may_spoil`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from megatron.elastic.engine.generation.buckets import Bucket
from megatron.elastic.engine.transaction.tools import Tools

__all__ = ["BackgroundGather"]


class BackgroundGather:
    """See the module docstring. ``buckets``: in the order of all ranks; own blocks are in the arena already.

    ``for_others``: this rank has the parameters of that version.
    """

    def __init__(self, tools: Tools, buckets: Sequence[Bucket], version: int, for_others: bool = False) -> None:
        self.version = version
        self._tools = tools
        self._for_others = for_others
        self._under_way: dict[int, list[tuple[Bucket, dist.Work]]] = {}
        tools.arena.filled = for_others
        for bucket in buckets:
            if len(bucket.members) > 1:
                values = tools.arena.parameters[bucket.start : bucket.stop]
                begun = bucket, tools.fabric.begin_all_gather_blocks(bucket.group, values, bucket.blocks)
                for unit in bucket.units:
                    self._under_way.setdefault(unit, []).append(begun)
        self.aside_ns = 0
        """Nanoseconds that forwards have waited for units."""
        self._uncollected = set(tools.arena.held.units)

    def wait_for(self, unit: int) -> None:
        """Return when the parameters of ``unit`` are those of the version, shared ones too. Raises ``CommError``."""
        if self._for_others or not self._uncollected:
            return
        began = time.monotonic_ns()
        compute_units = self._tools.interface.compute_units
        shared = [other for other in self._uncollected if other >= compute_units]
        for one in (*shared, unit):
            if one in self._uncollected:
                self._tools.reach("mid_overlap_gather", self.version + 1)
                self._await(one)
        self.aside_ns += time.monotonic_ns() - began

    def _await(self, unit: int) -> None:
        for bucket, work in self._under_way.pop(unit, ()):
            if not work.is_completed():
                self._tools.publish("gather", bucket.members)
            work.wait()
        self._tools.arena.collect((unit,))
        self._uncollected.discard(unit)

    def may_spoil(self) -> bool:
        """True if a gather for others, cut off now, may still write other values over this rank's parameters."""
        works = (work for begun in self._under_way.values() for _, work in begun)
        return self._for_others and not all(work.is_completed() and work.is_success() for work in works)

    def complete(self) -> None:
        """Wait for all units. Raises ``CommError``."""
        for unit in sorted(self._uncollected):
            self._await(unit)
        self._tools.arena.filled = True
