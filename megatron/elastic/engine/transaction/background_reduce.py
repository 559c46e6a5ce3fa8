"""The reduces and shipments of one computation of a step, beside its backward (docs/design.md §3.8).

    final     a unit's gradient is complete on this rank: in the last action of the table that computes a part of it
    start     its bucket is contributed to the sum of its group, in the background
    retain    an owner keeps the sum of its blocks
    send      and sends it to the mirrors, message by message (:class:`Shipment`)

All ranks start buckets in one order (:mod:`~megatron.elastic.plan.schedule.finishing`), so a bucket waits for those
before it. Before a bucket starts, everything that completes a gradient within the cell has been done for its units.
That is the sums over the cell (``finish_gradients``), the parts with local storage (``Arena.spread``), and the ranges
that another rank of the cell contributes (``View.silent``). This goes in the order in which the table finishes units,
which is that of all ranks of the cell.

Autograd tells the end of a unit inside a backward, once each of its parameters has its gradient. That is not used for
state-only units, whose parameters several units use. Nor is it used in a cell of another size than the launch's, whose
ranks may have parameters without elements. Such units are finished with the action. If a unit is finished by no action
here, its gradient is zero and final from the beginning.

Only the training thread changes state: between two units and between two actions it looks for what has come. So a loss
finds a block retained whole or not at all, and the gradients are discarded or kept by their key, as without overlap.
Exact mode agrees on the range of all gradients before any is reduced. Steps that compare replicas within a cell need
all gradients unreduced there. Such a rank starts its buckets after the backward, and others need not wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron.elastic.engine.generation.buckets import Bucket, Cut, buckets_of
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.transaction.shipment import Shipment
from megatron.elastic.engine.transaction.tools import Tools
from megatron.elastic.state.layout import StateBlock
from megatron.elastic.state.record import GradientKey

__all__ = ["BackgroundReduce"]


class BackgroundReduce:
    """See the module docstring. ``shipment``: sends the sums as they come; None: another phase sends them.

    ``cut``: of the gradients. ``computed``: compute units that this rank's table finishes.
    ``early``: start buckets behind the backward; otherwise in :meth:`complete`.
    """

    def __init__(
        self,
        tools: Tools,
        view: View,
        key: GradientKey,
        cut: Cut,
        computed: frozenset[int],
        shipment: Shipment | None,
        early: bool,
    ) -> None:
        self._tools, self._view, self._key, self._order = tools, view, key, cut.order
        self._computed, self.early = computed, early
        self.shipment = shipment
        if shipment is not None:
            shipment.post()
        compute_units, slices = tools.interface.compute_units, tools.arena.slices
        self._waiting = deque(buckets_of(view.spans, slices, cut, compute_units))
        self._running: deque[tuple[Bucket, dist.Work | None]] = deque()
        self._done: set[int] = set()
        self.aside_ns = 0
        """Nanoseconds spent on finished units, most of them inside backwards."""
        self._owned: dict[tuple[int, int], list[StateBlock]] = {}
        for block in view.owned:
            self._owned.setdefault((block.unit, block.shard), []).append(block)
        launched = len(view.tensor_ranks) == view.assignment.launch_topology.tensor
        self._watches = early and launched

    # -- beside the backward -----------------------------------------------------

    def begin(self) -> None:
        """Finish the units of which this rank's table computes nothing. Gradients have just been set to zero."""
        if self.early:
            held = self._tools.arena.held.units
            for unit in (unit for unit in self._order if unit in held and unit not in self._computed):
                if unit < self._tools.interface.compute_units:
                    self._finish(unit)
            self._finish_shared()

    @contextmanager
    def final(self, units: frozenset[int]) -> Iterator[None]:
        """Enclose the action after which the gradients of ``units`` are final."""
        if not (self.early and units):
            yield
            return
        with self._tools.arena.watching(units if self._watches else (), self._finish):
            yield
        for unit in (unit for unit in self._order if unit in units):
            self._finish(unit)
        self._finish_shared()

    def _finish_shared(self) -> None:
        if self._computed <= self._done:
            held = self._tools.arena.held.units
            for unit in (unit for unit in self._order if unit in held):
                self._finish(unit)

    def _finish(self, unit: int) -> None:
        """The gradient of ``unit`` is final here: start the buckets that are next."""
        if unit in self._done:
            return
        began = time.monotonic_ns()
        arena = self._tools.arena
        self._tools.interface.finish_gradients({unit: arena.gradient_views()[unit]})
        arena.spread(arena.gradients, (unit,))
        self._done.add(unit)
        while self._waiting and self._waiting[0].units <= self._done:
            self._start(self._waiting.popleft())
            self._tools.reach("mid_overlap_reduce", self._key.step + 1)
        self.advance()
        self.aside_ns += time.monotonic_ns() - began

    def _start(self, bucket: Bucket) -> None:
        tools = self._tools
        for start, stop in self._view.silent:
            if start < bucket.stop and bucket.start < stop:
                # x + -0.0 is x for every x, zeros included.
                tools.arena.gradients[max(start, bucket.start) : min(stop, bucket.stop)].fill_(-0.0)
        values, work = tools.arena.gradients[bucket.start : bucket.stop], None
        if len(bucket.members) > 1:
            work = tools.fabric.begin_reduce_scatter_blocks(bucket.group, values, bucket.blocks)
        self._running.append((bucket, work))

    def advance(self) -> None:
        """Take in the sums and messages that have come, and send what they complete. Raises ``CommError``."""
        while self._running and (self._running[0][1] is None or self._running[0][1].is_completed()):
            self._retain(*self._running.popleft())
        if self.shipment is not None:
            self.shipment.advance()

    def _retain(self, bucket: Bucket, work: dist.Work | None) -> None:
        if work is not None:
            work.wait()
        arena = self._tools.arena
        here = [block for space in bucket.spaces for block in self._owned.get(space, ())]
        gradients = {block.key: arena.block_gradients(block) for block in here}
        self._tools.pool.retain_all(self._key, gradients, self.shipment)

    # -- after it ------------------------------------------------------------------

    def complete(self) -> None:
        """Start what has not been started, and wait until every sum of this rank's blocks is here."""
        if self._waiting and not self.early:
            self._tools.arena.spread(self._tools.arena.gradients)
        while self._waiting:
            self._start(self._waiting.popleft())
        if self._view.spans:
            self._tools.reach("mid_reduce", self._key.step + 1)
        while self._running:
            self._tools.publish("reduce", self._running[0][0].members)
            self._retain(*self._running.popleft())
            self.advance()
