"""One step from samples to vote, and from vote to parameters (docs/design.md §3).

    compute  forward/backward by the schedule table; unscaled gradients per unit
    reduce   reduce-scatter per unit group by block owner; delegates send to owners that do not compute the unit
    ship     owners send reduced blocks to the copies that the vote is to name: their mirrors, as a rule
    vote     one all-reduce; with it the step is committed
    update   owners step their blocks, mirrors replay
    gather   parameters from masters, the same ways back

Phases up to the vote may be discarded and run again; survivors finish the phases after
it. A rank joins the vote when its reduces are done and the gradients it mirrors have
arrived, so every copy can finish a committed step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from megatron.elastic.comm.cut_off import as_interruption
from megatron.elastic.comm.fabric import BlockRange
from megatron.elastic.engine.compute.block_checksums import CHECKSUM_SLOTS, Disputes
from megatron.elastic.engine.compute.dropout import DropoutKey, dropout_scope
from megatron.elastic.engine.compute.exact_gradients import ExactGradients, OutOfRange, resolutions
from megatron.elastic.engine.compute.executor import Executor, Pass, PassResult
from megatron.elastic.engine.compute.ledger import Ledger
from megatron.elastic.engine.compute.point_to_point import BoundaryTransport
from megatron.elastic.engine.compute.replicas import unequal_replicas
from megatron.elastic.engine.compute.samples import PieceBatch
from megatron.elastic.engine.compute.vote import Tally, VoteLayout
from megatron.elastic.engine.generation.buckets import Cut, buckets_of
from megatron.elastic.engine.generation.view import GroupSpan, View
from megatron.elastic.engine.settings import OverlapSettings
from megatron.elastic.engine.transaction.background_gather import BackgroundGather
from megatron.elastic.engine.transaction.background_reduce import BackgroundReduce
from megatron.elastic.engine.transaction.block_exchange import exchange_blocks
from megatron.elastic.engine.transaction.shipment import Shipment, ShipmentPlan, plan_shipment, way_to
from megatron.elastic.engine.transaction.tools import StepInput, Tools
from megatron.elastic.plan.model import Piece
from megatron.elastic.plan.pace import Range
from megatron.elastic.plan.schedule.finishing import finishing_order
from megatron.elastic.state.certificate import CertificateError
from megatron.elastic.state.layout import StateBlock, UnitLayout
from megatron.elastic.state.placement import Placement
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import GradientKey, StepRecord

__all__ = ["StepBody"]

_SHIP_TAG = 1 << 30
_RELAY_TAG = _SHIP_TAG + 0x400


def _nothing() -> None:
    return None


class StepBody:
    """The phases of steps within one generation."""

    def __init__(
        self,
        tools: Tools,
        view: View,
        overlap: OverlapSettings,
        verify_interval: int = 0,
        transport: type[BoundaryTransport] = BoundaryTransport,
    ) -> None:
        self._tools = tools
        self.overlap = overlap
        self._verify_interval = verify_interval
        self._view = view
        self.disputes = Disputes()
        self.compared = 0
        """Interval of the comparison of contents in the last :meth:`ship`; 0: none were compared."""
        self._background: BackgroundReduce | None = None
        self._shipment: Shipment | None = None
        """Takes the gradients of the present computation to the copies of the present placement."""
        self._order = finishing_order(
            view.plan, sorted({unit for unit, _ in tools.layouts}), tools.interface.compute_units
        )
        # Reduced beside the backward, gradients leave bucket by bucket; otherwise all at once.
        self._cut = Cut(self._order, overlap.bucket if overlap.reduce else sys.maxsize)
        tools.messages.clear()  # another generation may have other messages
        self._shipment_plan = plan_shipment(view.routes, self._cut, tools.messages, tools.fabric)
        self._transport = transport(
            tools.fabric.group("pipeline", range(tools.fabric.slots)), lambda peer: tools.publish("pipeline", (peer,))
        )
        self._executor = (
            None
            if view.cell is None
            else Executor(
                tools.interface,
                self._transport,
                view.plan,
                view.cell,
                view.cell.ranks.index(view.rank),
                tools.arena.accumulate,
                tools.arena.device,
                tools.clock,
            )
        )

    # -- compute ---------------------------------------------------------------

    def train(
        self, step: StepInput, record: StepRecord, key: GradientKey, ships: bool, gathering: BackgroundGather | None
    ) -> PassResult:
        """Run :meth:`compute` once, or in exact mode until all gradients are in range. Raises ``OutOfRange``.

        ``key``: of the gradients. ``ships``: they go to the copies of the present placement, which is known already.
        ``gathering``: the gather of the parameters, if it is under way; it is over on return.
        """
        exact, self._shipment = self._tools.exact, None
        if ships and self._tools.pool.snapshot == "gradient":
            self._shipment = self._sent(self._shipment_plan, key, self._verify_interval)
        if exact is None:
            self._background = self._behind(step.step, key) if self.overlap.reduce else None
            return self.compute(step, record, gathering)
        for places in resolutions(record.loss_scale):
            exact.begin(places)
            result = self.compute(step, record, gathering)
            if exact.agreed(self._tools.fabric.world):
                return result
        raise OutOfRange(f"step {step.step}: a gradient is outside the range that --elastic-exact can add exactly")

    def _sent(self, plan: ShipmentPlan, key: GradientKey, interval: int) -> Shipment:
        return Shipment(self._tools, plan, key, interval, _SHIP_TAG + ((key.step + 1) & 0xFF))

    def _behind(self, step: int, key: GradientKey) -> BackgroundReduce:
        """Return what reduces, and ships, the gradients of ``key`` while they are computed."""
        tools, view = self._tools, self._view
        early = not self._compares(step) and all(tools.fabric.begins_at_once(span.group) for span in view.spans)
        computed = frozenset[int]() if self._executor is None else self._executor.finished_units
        return BackgroundReduce(tools, view, key, self._cut, computed, self._shipment, early)

    def compute(
        self,
        step: StepInput,
        record: StepRecord,
        gathering: BackgroundGather | None = None,
        *,
        training: bool = True,
    ) -> PassResult:
        """Run forward (and backward) of this rank's pieces at ``record``; a parked rank computes nothing.

        ``gathering``: wait for the parameters of each unit when it is computed.

        Raises ``RuntimeError`` if a recovery or a migration has left parameters without values (rule 31), and what the
        model raises, unless collectives were cut off (rule 32).
        """
        tools = self._tools
        with as_interruption(tools.fabric):
            if training:
                tools.arena.zero_gradients()
            if self._executor is None:
                if gathering is not None:
                    gathering.complete()
                return PassResult()
            if gathering is None and not tools.arena.filled:
                raise RuntimeError(f"step {step.step} would be computed with parameters that have not been gathered")
            batches = self._batches(step, self._executor.data_pieces())
            tools.publish("compute", ())
            grid, balance, scaling = self._view.plan.grid, tools.settings.hyper.balance, tools.settings.hyper.scaling
            behind = self._background if training and self._background is not None and self._background.early else None
            if behind is not None:
                behind.begin()
            work = Pass(
                step=step.step,
                address=step.address,
                forward_step=step.forward_step,
                batches=batches,
                scope=lambda piece: self._scope(step, piece),
                reach=(lambda point: tools.reach(point, step.step)) if training else _nowhere,
                drag=lambda spent: tools.drag(step.step, spent),
                timeline=tools.timeline,
                loss_scale=record.loss_scale if training else 1.0,
                per_token=tools.settings.per_token_loss,
                # Micro-batches of one replica at launch, as in Megatron. The vote's denominator averages over
                # replicas, so a loss scale overflows at the same values as in Megatron.
                microbatches=self._view.plan.rows / (grid.micro_batch_size * grid.data_parallel_size),
                training=training,
                expert_bias={} if balance is None else balance.by_unit(record.expert_bias),
                scales={} if scaling is None else scaling.scales(record.fp8_scales),
                final=_at_no_end if behind is None else behind.final,
                between=_nothing if behind is None else behind.advance,
                aside=lambda: sum(one.aside_ns for one in (behind, gathering) if one is not None),
            )
            with nullcontext() if gathering is None else tools.interface.announcing(gathering.wait_for):
                result = self._executor.run(work)
            if gathering is not None:
                gathering.complete()
            if training and behind is None:
                gradients = tools.arena.gradient_views() if tools.exact is None else tools.exact.views()
                tools.interface.finish_gradients(gradients)
                if self._compares(step.step):
                    self._compare_replicas(step.step, gradients)
            return result

    def _compares(self, step: int) -> bool:
        """Return whether the gradients of this step are compared within this rank's tensor-parallel group."""
        interval = self._verify_interval
        return len(self._view.tensor_ranks) > 1 and interval > 0 and (step - 1) % interval == 0

    def _compare_replicas(self, step: int, gradients: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Raise ``CertificateError`` if gradients of replicated parameters differ in this tensor-parallel group."""
        group = self._tools.fabric.group("tensor", self._view.tensor_ranks)
        unequal = unequal_replicas(self._tools.interface, gradients, group)
        if unequal:
            raise CertificateError([f"step {step}: gradients of {name} differ within a cell" for name in unequal])

    def _batches(self, step: StepInput, pieces: Sequence[Piece]) -> Callable[[Piece], PieceBatch]:
        """Return the samples of this rank's pieces; only the first rank of a cell reads the data set."""
        if step.source is None:
            return lambda piece: PieceBatch.as_planned(step.address.samples(piece))
        reads = self._tools.interface.reads_data()
        step.source.plan(pieces if reads else ())
        return step.source.begin(step.address) if reads else lambda piece: PieceBatch()

    def _scope(self, step: StepInput, piece: Piece) -> AbstractContextManager[None]:
        return dropout_scope(DropoutKey(self._tools.settings.seed, step.step, step.address.samples(piece)))

    # -- reduce and ship -------------------------------------------------------

    def reduce(self, key: GradientKey) -> None:
        """Sum gradients over each unit group. Owners receive the sums and retain them under ``key``."""
        if self._background is not None:
            self._background.complete()
        else:
            self._reduce_spans(key)
        self._relay(key)

    def _reduce_spans(self, key: GradientKey) -> None:
        tools = self._tools
        tools.arena.spread(tools.arena.gradients)
        for start, stop in self._view.silent:
            if tools.exact is not None:
                tools.exact.withhold(start, stop)
            else:  # x + -0.0 is x for every x, zeros included.
                tools.arena.gradients[start:stop].fill_(-0.0)
        for span in self._view.spans:
            if span is self._view.spans[-1]:
                tools.reach("mid_reduce", key.step + 1)
            tools.publish("reduce", span.members)
            if tools.exact is not None:
                self._reduce_exactly(tools.exact, span)
            else:
                self._reduce_scatter(span, tools.arena.gradients[span.start : span.stop])
        here = [block for block in self._view.owned if self._computes(block)]
        gradients = {block.key: tools.arena.block_gradients(block) for block in here}
        tools.pool.retain_all(key, gradients, self._shipment)

    def _reduce_exactly(self, exact: ExactGradients, span: GroupSpan) -> None:
        """Sum the integers of a span, and convert those of this rank's blocks."""
        self._reduce_scatter(span, exact.sums(span.start, span.stop))
        for block in span.blocks:
            if block.owner == self._view.rank:
                exact.total(span.start + block.start, span.start + block.stop)

    def _relay(self, key: GradientKey) -> None:
        """Send sums from delegates to the owners that do not compute the units."""
        tools = self._tools

        def unpack(blocks: tuple[StateBlock, ...], parts: tuple[torch.Tensor, ...], _: torch.Tensor) -> None:
            for block, gradient in zip(blocks, parts, strict=True):
                room = None if self._shipment is None else self._shipment.room(block.key)
                tools.pool.retain(block.key, key, gradient, room)

        exchange_blocks(
            self._tools,
            self._view.relays.to_owners,
            lambda blocks: torch.cat([tools.arena.block_gradients(block) for block in blocks]).cpu(),
            unpack,
            1,
            0,
            _RELAY_TAG + ((key.step + 1) & 0xFF),
            lambda: tools.reach("in_relay_to_owner", key.step + 1),
        )

    def _computes(self, block: StateBlock) -> bool:
        """Return whether this rank computes with the parameters of ``block``."""
        return block.key[:2] in self._tools.arena.slices

    def _reduce_scatter(self, span: GroupSpan, values: torch.Tensor) -> None:
        if len(span.members) > 1:
            self._tools.fabric.reduce_scatter_blocks(span.group, values, span.blocks)

    def ship(self, gradient_key: GradientKey, named: Placement) -> None:
        """Send reduced blocks from owners to the copies that the vote is to name, each with a checksum.

        Copies whose checksums differ are added to ``disputes``. In ``state`` mode blocks go only to future owners;
        mirrors receive state by :meth:`follow`. Contents are not compared while copies are about to leave: once an
        owner has left, the right copy could no longer be told from the wrong one.
        """
        shipment = self._shipment
        if shipment is not None and named is not self._view.placement:
            raise RuntimeError("gradients were shipped to the copies of another placement than the vote is to name")
        if shipment is None:
            self.disputes, self.compared = Disputes(), 0
            if named is not self._view.placement:
                shipment = self._sent(self.shipment_to(named), gradient_key, 0)
            elif self._tools.pool.snapshot == "state":
                return
            else:
                shipment = self._sent(self._shipment_plan, gradient_key, self._verify_interval)
        shipment.complete()
        self.disputes, self.compared = shipment.disputes, shipment.interval

    def shipment_to(self, named: Placement) -> ShipmentPlan:
        """Return the messages of this rank's blocks to the copies of the placement ``named``."""
        way = way_to(self._tools, self._view, named)
        return plan_shipment(way, self._cut, self._tools.messages, self._tools.fabric)

    def follow(self, record: StepRecord) -> None:
        """Send updated blocks from owners to mirrors, with their lineage; ``state`` mode only.

        Returns when every mirror of every rank has them: no rank may begin the next step
        while a loss could still force another rank back before this one.
        """
        pool = self._tools.pool

        def pack(blocks: tuple[StateBlock, ...]) -> torch.Tensor:
            copies = [pool.get(block.key) for block in blocks]
            lineages = bytearray.fromhex("".join(copy.lineage for copy in copies))
            states = [state.view(-1) for state in pool.read(block.key for block in blocks)]
            return torch.cat([*states, torch.frombuffer(lineages, dtype=torch.float32)])

        def unpack(blocks: tuple[StateBlock, ...], parts: tuple[torch.Tensor, ...], lineages: torch.Tensor) -> None:
            text = lineages.contiguous().view(torch.uint8).numpy().tobytes().hex()
            for number, (block, state) in enumerate(zip(blocks, parts, strict=True)):
                pool.adopt(block.key, state.view(3, -1), record, text[32 * number : 32 * (number + 1)])

        tag = _SHIP_TAG + 0x200 + (record.version & 0xFF)
        exchange_blocks(self._tools, self._view.routes, pack, unpack, 3, CHECKSUM_SLOTS, tag)
        dist.barrier(group=self._tools.fabric.world)

    def share(self, version: int) -> None:
        """Send whole state (master and moments) from owners to mirrors, after a start or a load."""
        pool = self._tools.pool

        def unpack(blocks: tuple[StateBlock, ...], parts: tuple[torch.Tensor, ...], _: torch.Tensor) -> None:
            for block, state in zip(blocks, parts, strict=True):
                _put(pool, block, state, version)

        exchange_blocks(
            self._tools,
            self._view.routes,
            lambda blocks: torch.cat([state.reshape(-1) for state in pool.read(block.key for block in blocks)]),
            unpack,
            3,
            0,
            _SHIP_TAG + 0x100,
        )

    # -- vote ------------------------------------------------------------------

    def tally(self, result: PassResult, key: GradientKey) -> Tally:
        """Return this rank's tally for the vote on the gradients of ``key``."""
        tools, view = self._tools, self._view
        counted = view.leads
        tally = Tally(
            tokens=result.tokens if counted else 0.0,
            ledger=result.ledger if counted else Ledger(),
            report=result.report if counted else {},
            rows=tuple(sorted(result.rows)) if counted else (),
            disputes=len(self.disputes.marks),
            suspects=len(self.disputes.contents),
            steady=int(tools.steady_clock),
            times=self._times(result) if counted else {},
            expert_tokens=result.expert_tokens,
        )
        self.weigh(tally, key)
        return tally

    def _times(self, result: PassResult) -> dict[Range, tuple[int, int]]:
        if self._executor is None or self._view.cell is None:
            return {}
        cell = self._view.cell.id
        return {(cell, *span): spent for span, spent in result.times(self._executor.pieces).items()}

    def weigh(self, tally: Tally, key: GradientKey) -> None:
        """Compute norms, overflows and zeros of the gradients that this rank owns in this generation."""
        tally.norms = {block.key: self._tools.pool.norm_sq(block.key, key) for block in self._view.owned}
        tally.overflows = sum(not math.isfinite(square) for square in tally.norms.values())
        tally.zeros = self._zeros(key) if self._tools.settings.count_zeros else 0

    def vote(self, layout: VoteLayout, tally: Tally) -> Tally:
        """Return the sum over all living ranks. Raises ``RuntimeError`` when plans differ."""
        tools = self._tools
        tools.publish("vote", self._view.living)
        total = layout.unpack(*tools.fabric.sum_over_ranks(*layout.pack(tally)))
        if total.voters != len(self._view.living):
            raise RuntimeError(f"only {total.voters} of {len(self._view.living)} ranks took part in the vote")
        if total.plan != tally.plan * total.voters:
            raise RuntimeError(
                "ranks disagree about the plan of this generation, the placement of state, "
                "the record of the previous step, or the samples of this step"
            )
        return total

    def _zeros(self, key: GradientKey) -> int:
        """Count the zero gradient elements of the blocks that this rank owns, without padding."""
        count = 0
        for block in self._view.owned:
            gradient = self._tools.pool.get(block.key).host_gradient(key)
            for slot in self._tools.layouts[block.unit, block.shard].params_in(block):
                part = gradient[max(slot.start - block.start, 0) : slot.stop - block.start]
                count += int(part.numel() - torch.count_nonzero(part).item())
        return count

    # -- after the vote --------------------------------------------------------

    def gather(self, step: int, came: Collection[int] = ()) -> None:
        """Gather the parameters of every held unit from the masters of their owners.

        ``came``: units that moved with this step, equal on all ranks. If all ranks that compute such a unit have
        copies of all its blocks, each uses its own copies, which are of this version.
        """
        tools, view = self._tools, self._view
        self._fill(step, came)
        for span in view.spans:
            if span is view.spans[-1]:
                tools.reach("mid_gather", step)
            if len(span.members) == 1:
                continue
            tools.publish("gather", span.members)
            for start, stop, blocks in self._gathered(span, came):
                tools.fabric.all_gather_blocks(span.group, tools.arena.parameters[start:stop], blocks)
        tools.arena.collect()
        tools.arena.filled = True

    def begin_gather(self, step: int, for_others: bool = False) -> BackgroundGather:
        """Begin the gather, for the next forward to wait for unit by unit; not if it is ``for_others`` alone."""
        tools = self._tools
        self._fill(step)
        tools.reach("mid_gather", step)
        units = range(1 + max(self._order, default=-1))
        shared = units[tools.interface.compute_units :]
        cut = Cut((*shared, *units[: tools.interface.compute_units]), self.overlap.bucket)
        buckets = buckets_of(self._view.spans, tools.arena.slices, cut, tools.interface.compute_units)
        return BackgroundGather(tools, buckets, step, for_others)

    def _fill(self, step: int, came: Collection[int] = ()) -> None:
        """Write the masters of this rank's blocks into the arena, and bring those of owners elsewhere to delegates."""
        tools, view = self._tools, self._view
        mirrored = (block for block in view.mirrored if block.unit in came)
        here = filter(self._computes, (*view.owned, *mirrored))
        tools.arena.set_parameters([(block, tools.pool.get(block.key).master) for block in here])

        def unpack(blocks: tuple[StateBlock, ...], parts: tuple[torch.Tensor, ...], _: torch.Tensor) -> None:
            tools.arena.set_parameters(list(zip(blocks, parts, strict=True)))

        exchange_blocks(
            self._tools,
            view.relays.from_owners,
            lambda blocks: torch.cat([state[0] for state in tools.pool.read(block.key for block in blocks)]),
            unpack,
            1,
            0,
            _RELAY_TAG + 0x100 + (step & 0xFF),
            lambda: tools.reach("in_relay_to_delegate", step),
        )

    def _gathered(self, span: GroupSpan, came: Collection[int]) -> Iterator[tuple[int, int, Sequence[BlockRange]]]:
        """Yield ranges ``[start, stop)`` of the arena to gather, with their blocks relative to ``start``."""
        pieces = [p for p in self._tools.arena.slices.values() if span.start <= p.start < span.stop]
        if not any(piece.layout.unit in came for piece in pieces):
            yield span.start, span.stop, span.blocks
            return
        for piece in pieces:
            if piece.layout.unit not in came or not self._have_copies(span.members, piece.layout):
                first, last = piece.start - span.start, piece.stop - span.start
                inside = [block for block in span.blocks if first <= block.start < last]
                ranges = [BlockRange(b.start - first, b.stop - first, b.owner) for b in inside]
                yield piece.start, piece.stop, ranges

    def _have_copies(self, ranks: Collection[int], layout: UnitLayout) -> bool:
        copies = self._view.placement.copies
        return all(set(ranks) <= set(copies[block.key].ranks) for block in layout.blocks)


def _nowhere(point: str) -> None:
    return None


def _at_no_end(units: frozenset[int]) -> AbstractContextManager[None]:
    return nullcontext()


def _put(pool: StatePool, block: StateBlock, state: torch.Tensor, version: int) -> None:
    master, exp_avg, exp_avg_sq = state.view(3, block.numel)
    pool.put(block.key, master, version, exp_avg, exp_avg_sq)
