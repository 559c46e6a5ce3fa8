"""The execution of one cell's schedule table.

The table is data (``plan/schedule/table.py``): the executor has no pipeline schedule
of its own. It performs actions strictly in order. A receive is posted by its action and
waited for by the action that consumes it; sends are asynchronous. Between two pieces of
one cell the tensor is not copied. For any order of the table, a piece's backward runs in
the process that ran its forward. If the table splits a backward, its input part queues
the weight gradients in the model, and its weight part computes them. Activations live
until then, as ``plan/schedule/validate.py`` counts them.

Loss weights are those of the launch's sample grid (docs/design.md §7). With per-token
loss they are the plain sum, divided by the step's token count after the vote. Otherwise they
are each micro-batch's own mean, divided by the number of micro-batches of a replica at
launch; the replicas are averaged after the vote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from megatron.elastic.config import ConfigError
from megatron.elastic.engine.compute.device_numbers import on_device
from megatron.elastic.engine.compute.ledger import Ledger, LedgerError
from megatron.elastic.engine.compute.model_interface import (
    ROW_DIM,
    DeferredWeights,
    ForwardStep,
    LossOutput,
    ModelInterface,
    place_of,
)
from megatron.elastic.engine.compute.piece_times import HOST_CLOCK, Clock, PieceTimes
from megatron.elastic.engine.compute.point_to_point import BoundaryTransport, Receipt
from megatron.elastic.engine.compute.samples import PieceBatch, StepAddress
from megatron.elastic.engine.compute.sequence_cut import SequenceCut, taken
from megatron.elastic.engine.compute.sequence_transfers import Transfer, boundary_transfers
from megatron.elastic.observe.timeline import Timeline
from megatron.elastic.plan.model import Action, Cell, Edge, Op, Piece, Plan
from megatron.elastic.plan.schedule.finishing import final_actions

__all__ = ["Executor", "Pass", "PassResult"]

_BACKWARD_OPS = frozenset({Op.BACKWARD, Op.SEND_BACKWARD, Op.RECV_BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})


@dataclass(frozen=True)
class Pass:
    """One pass over the batch: its samples, callbacks and loss weights."""

    step: int
    address: StepAddress
    forward_step: ForwardStep
    batches: Callable[[Piece], PieceBatch]
    scope: Callable[[Piece], AbstractContextManager[None]]
    """Entered around forward and backward of a piece: dropout keys."""
    reach: Callable[[str], None]
    """Called at named points (fault injection)."""
    drag: Callable[[Callable[[], int]], None]
    """Called after every computation with a function that waits for it and returns its nanoseconds; sleeps on a rank
    that is slowed by fault injection."""
    timeline: Timeline
    final: Callable[[frozenset[int]], AbstractContextManager[None]]
    """Entered around the action after which the gradients of these compute units are final."""
    between: Callable[[], None]
    """Called after each action."""
    aside: Callable[[], int]
    """Returns the nanoseconds spent so far, inside computations, on communication that goes on behind them."""
    loss_scale: float = 1.0
    per_token: bool = False
    microbatches: float = 1.0
    """Micro-batches of the step on one replica at launch, without those that the plan leaves out."""
    training: bool = True
    expert_bias: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Unit → bias of its router, by expert."""
    scales: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Unit → scale of each of its tensors in FP8, where scales follow past steps."""


@dataclass
class PassResult:
    """The results of a pass on this cell: sums of reported values, and the ledger."""

    tokens: float = 0.0
    report: dict[str, tuple[float, float]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    """Rows of the global batch whose loss was computed here."""
    ledger: Ledger = field(default_factory=Ledger)
    """Samples that the results were really computed from."""
    contents: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))
    """Sample → digest of its contents, as read for the first unit and for the loss; to explain a refused vote."""
    expert_tokens: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Unit → tokens that each of its experts received from here, where they are counted."""
    amaxes: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Unit → largest absolute value of each of its tensors in FP8, where scales follow from them."""
    measured: PieceTimes = field(default_factory=PieceTimes)
    _unread: list[tuple[torch.Tensor | None, dict[str, torch.Tensor], float]] = field(default_factory=list)
    """Tokens and reported values of losses, which the device may not have computed yet, and the weight of means."""

    def reported(self, output: LossOutput, share: float) -> None:
        """Take the values of one loss, of ``share`` of a micro-batch. Does not wait for the device."""
        tokens = None if output.tokens is None else output.tokens.detach()
        report = {key: value.detach().reshape(-1) for key, value in output.report.items()}
        self._unread.append((tokens, report, share))

    def read(self) -> None:
        """Add up the values of all losses so far; waits until the device has computed them. Raises ``ValueError``."""
        unread, self._unread = self._unread, []
        for tokens, report, share in unread:
            if tokens is not None:
                self.tokens += float(tokens)
            for key, flat in report.items():
                self._add(key, flat.cpu().double(), share)

    def _add(self, key: str, flat: torch.Tensor, share: float) -> None:
        if flat.numel() not in (1, 2):
            raise ValueError(
                f"the loss function reports {key!r} with {flat.numel()} values: "
                "return 1 (a mean) or 2 (a sum and its count)"
            )
        total, count = (float(flat[0]), float(flat[1])) if flat.numel() == 2 else (float(flat[0]) * share, share)
        before = self.report.get(key, (0.0, 0.0))
        self.report[key] = (before[0] + total, before[1] + count)

    def times(self, pieces: Mapping[int, Piece]) -> dict[tuple[int, int], tuple[int, int]]:
        """Return (first unit, end unit) → nanoseconds of (forwards, backwards). Waits for the device."""
        sums = dict[tuple[int, int], list[int]]()
        for op, number, start_ns, end_ns, aside_ns in self.measured.read():
            piece = pieces[number]
            if piece.rows:  # the time of others is that of other cells
                both = sums.setdefault((piece.first, piece.end), [0, 0])
                both[op is not Op.FORWARD] += end_ns - start_ns - aside_ns
        return {span: (forwards, backwards) for span, (forwards, backwards) in sums.items()}


@dataclass
class _Running:
    """A piece between its forward and its backward."""

    source: torch.Tensor | None
    output: torch.Tensor


class Executor:
    """Executes ``plan``'s table for ``cell`` at tensor-parallel ``position``.

    ``accumulate(parameter, gradient)`` adds weight gradients computed outside of autograd.
    """

    def __init__(
        self,
        interface: ModelInterface,
        transport: BoundaryTransport,
        plan: Plan,
        cell: Cell,
        position: int,
        accumulate: Callable[[torch.nn.Parameter, torch.Tensor], None],
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
        clock: Clock = HOST_CLOCK,
    ) -> None:
        self._interface = interface
        self._transport = transport
        self._plan = plan
        self._cell = cell
        self._position = position
        self._accumulate = accumulate
        self._device = device
        self._clock = clock
        self._split = frozenset(a.piece for a in plan.table(cell.id) if a.op is Op.BACKWARD_INPUT)
        self._pieces = {piece.id: piece for piece in plan.pieces}
        self._final = final_actions(plan, cell.id)
        self._cells = {c.id: c for c in plan.cells}
        self._into: dict[int, list[int]] = {}
        self._out_of: dict[int, list[int]] = {}
        for index, edge in enumerate(plan.edges):
            self._into.setdefault(edge.target, []).append(index)
            self._out_of.setdefault(edge.source, []).append(index)
        self._reset()

    def _reset(self) -> None:
        self._running: dict[int, _Running] = {}
        self._deferred: dict[int, DeferredWeights] = {}
        self._receipts: dict[tuple[int, bool], Receipt] = {}
        self._local: dict[tuple[int, bool], torch.Tensor] = {}
        self._source_gradients: dict[int, torch.Tensor] = {}
        """Piece → gradient of its input, until the last part of it is sent."""

    @property
    def finished_units(self) -> frozenset[int]:
        """The compute units whose gradients this cell's table computes."""
        return frozenset[int]().union(*self._final.values())

    @property
    def pieces(self) -> Mapping[int, Piece]:
        """All pieces of the plan by number."""
        return self._pieces

    def data_pieces(self) -> tuple[Piece, ...]:
        """Return the pieces of this cell that read the data set, in order of their forwards."""
        order = [a.piece for a in self._plan.table(self._cell.id) if a.op is Op.FORWARD]
        return tuple(p for p in (self._pieces[i] for i in order) if p.rows and self._interface.takes_batch(p))

    def run(self, work: Pass) -> PassResult:
        """Execute every action; gradients accumulate in the arena. Raises the communicator's typed errors."""
        result = PassResult(measured=PieceTimes(self._clock))
        self._reset()
        self._interface.parameters_changed()
        self._interface.set_expert_bias(work.expert_bias)
        if work.scales:
            self._interface.set_scales(work.scales)
        if work.training:
            self._interface.weigh_layer_losses(work.loss_scale / (1.0 if work.per_token else work.microbatches))
        try:
            for index, action in enumerate(self._plan.table(self._cell.id)):
                if work.training or action.op not in _BACKWARD_OPS:
                    with work.final(self._final.get(index, frozenset())):
                        self._perform(action, work, result)
                work.between()
            if self._deferred:
                raise RuntimeError(f"the schedule computes no weight gradients for pieces {sorted(self._deferred)}")
            if work.training and self._running:
                raise RuntimeError(f"the schedule has no backward for pieces {sorted(self._running)}")
            self._transport.flush()
            result.read()
            if work.training:
                result.report |= self._interface.layer_losses()
                result.expert_tokens = self._interface.expert_tokens()
                result.amaxes = self._interface.amaxes() if work.scales else {}
            if work.timeline.enabled:
                self._draw(result, work.timeline)
        finally:
            self._reset()
            self._transport.abandon()
        return result

    def _perform(self, action: Action, work: Pass, result: PassResult) -> None:
        piece = self._pieces[action.piece]
        match action.op:
            case Op.RECV_FORWARD | Op.RECV_BACKWARD:
                self._post(action.edge, work.step, backward=action.op is Op.RECV_BACKWARD)
            case Op.FORWARD:
                work.reach("mid_forward")
                self._forward(action, piece, work, result)
            case Op.BACKWARD:
                work.reach("mid_backward")
                self._backward(action, piece, work, result)
                self._accumulated(piece, work, result)
            case Op.BACKWARD_INPUT:
                work.reach("mid_backward")
                with self._interface.deferring(piece) as self._deferred[piece.id]:
                    self._backward(action, piece, work, result)
            case Op.BACKWARD_WEIGHT:
                with _timed(action, work, result):
                    self._deferred.pop(piece.id).run(self._accumulate)
                self._accumulated(piece, work, result)
            case Op.SEND_FORWARD:
                edge = self._plan.edges[action.edge]
                running = self._running[piece.id]
                self._emit(running.output, edge.source_at, action.edge, edge.target, work.step, backward=False)
                if not work.training and action.edge == self._remote(piece, backward=False)[-1]:
                    del self._running[piece.id]
            case Op.SEND_BACKWARD:
                edge = self._plan.edges[action.edge]
                gradient = self._source_gradients[piece.id]
                self._emit(gradient, edge.target_at, action.edge, edge.source, work.step, backward=True)
                if action.edge == self._remote(piece, backward=True)[-1]:
                    del self._source_gradients[piece.id]

    def _draw(self, result: PassResult, timeline: Timeline) -> None:
        for op, number, start_ns, end_ns, _ in result.measured.read():
            piece = self._pieces[number]
            timeline.computed(op.value, piece.id, piece.first, piece.end, start_ns, end_ns)

    def _accumulated(self, piece: Piece, work: Pass, result: PassResult) -> None:
        if piece.rows:
            result.ledger.accumulated(piece, work.address.samples(piece))

    def _ghost(self, action: Action, piece: Piece, work: Pass, result: PassResult) -> None:
        """Run the forward of a piece without rows: its crew exchanges tokens in it."""
        grad_mode = nullcontext() if work.training else torch.no_grad()
        splittable = self._interface.deferring(piece) if work.training and piece.id in self._split else nullcontext()
        with work.scope(piece), grad_mode, splittable, _timed(action, work, result):
            place = place_of(piece.first, piece.end, self._interface.compute_units)
            output = self._interface.ghost(piece, place)
        if work.training:
            self._running[piece.id] = _Running(None, output)

    def _forward(self, action: Action, piece: Piece, work: Pass, result: PassResult) -> None:
        if not piece.rows:
            self._ghost(action, piece, work, result)
            return
        source = self._assemble(piece, backward=False) if piece.first > 0 else None
        if source is not None and work.training:
            source.requires_grad_(True)
        grad_mode = nullcontext() if work.training else torch.no_grad()
        splittable = self._interface.deferring(piece) if work.training and piece.id in self._split else nullcontext()
        batch = work.batches(piece)
        with work.scope(piece), grad_mode, splittable, _timed(action, work, result):
            place = place_of(piece.first, piece.end, self._interface.compute_units)
            output = self._interface.forward(work.forward_step, piece, place, source, batch)
        self._enter(piece, batch, work, result)
        if isinstance(output, LossOutput):
            result.rows.extend(piece.rows)
            result.reported(output, len(piece.rows) / self._plan.grid.micro_batch_size)
            output = _weighted(output, piece, self._plan, work, result)
            if not work.training:
                return
        self._hand_over(piece, output.detach(), backward=False)
        if work.training or self._remote(piece, backward=False):
            self._running[piece.id] = _Running(source, output)

    def _enter(self, piece: Piece, batch: PieceBatch, work: Pass, result: PassResult) -> None:
        """Compare the samples of a piece with the plan, and enter them into the ledger for the vote."""
        if self._position > 0:  # the first rank of a cell reads the data set and sends it to the others
            return
        units, reading = self._interface.compute_units, batch.reading
        try:
            result.ledger.read(piece, work.address.samples(piece), reading, units)
        except LedgerError as error:
            raise LedgerError(f"step {work.step}, rank {self._cell.ranks[0]}: {error}") from None
        for seen, here in zip(result.contents, (piece.first == 0, piece.end == units), strict=True):
            if here and reading is not None:
                seen.update(zip(reading.samples, reading.contents, strict=True))

    def _backward(self, action: Action, piece: Piece, work: Pass, result: PassResult) -> None:
        running = self._running.pop(piece.id)
        gradient: torch.Tensor | None = None
        if not piece.rows:
            gradient = torch.zeros_like(running.output)
        elif piece.end < self._interface.compute_units:
            gradient = self._assemble(piece, backward=True)
        with work.scope(piece), _timed(action, work, result):
            torch.autograd.backward(running.output, grad_tensors=gradient)
        if running.source is not None:
            assert running.source.grad is not None
            self._hand_over(piece, running.source.grad, backward=True)
            if self._remote(piece, backward=True):
                self._source_gradients[piece.id] = running.source.grad

    def _hand_over(self, piece: Piece, tensor: torch.Tensor, *, backward: bool) -> None:
        """Keep the output of ``piece`` for adjacent pieces of this cell: tables have no transfer within a cell."""
        for index in (self._into if backward else self._out_of).get(piece.id, ()):
            edge = self._plan.edges[index]
            if self._peer(edge, backward=not backward) == self._cell.id:
                self._local[(index, backward)] = _rows(tensor, edge.target_at if backward else edge.source_at)

    def _peer(self, edge: Edge, *, backward: bool) -> int:
        """Return the cell that ``edge`` receives from."""
        return self._pieces[edge.target if backward else edge.source].cell

    def _remote(self, piece: Piece, *, backward: bool) -> list[int]:
        """Return the edges on which the cell sends the output of ``piece`` or its input's gradient, in table order."""
        edges = (self._into if backward else self._out_of).get(piece.id, ())
        return [i for i in edges if self._peer(self._plan.edges[i], backward=not backward) != self._cell.id]

    def _assemble(self, piece: Piece, *, backward: bool) -> torch.Tensor:
        """Return the rows of every edge of ``piece`` as one ``[s, rows, h]`` tensor."""
        edges = (self._out_of if backward else self._into).get(piece.id, [])
        if len(edges) == 1 and _positions(self._plan.edges[edges[0]], backward) == tuple(range(len(piece.rows))):
            return self._take(edges[0], backward)
        shape, dtype = self._interface.boundary(len(piece.rows))
        whole: torch.Tensor | None = None
        for index in edges:
            part = self._take(index, backward)
            if whole is None:
                whole = torch.empty(shape, dtype=dtype, device=part.device)
            at = on_device(_positions(self._plan.edges[index], backward), part.device)
            whole.index_copy_(ROW_DIM, at, part)
        assert whole is not None, f"piece {piece.id} has no edge to read from"
        return whole

    def _take(self, edge: int, backward: bool) -> torch.Tensor:
        if (edge, backward) in self._local:
            return self._local.pop((edge, backward))
        return self._receipts.pop((edge, backward)).wait()

    def _post(self, index: int, step: int, *, backward: bool) -> None:
        edge = self._plan.edges[index]
        peer = self._peer(edge, backward=backward)
        shape, dtype = self._interface.boundary(len(edge.rows))
        buffer = torch.empty(shape, dtype=dtype, device=self._device)
        ranks = self._cells[peer].ranks
        parts = [
            (ranks[item.sender], tuple((put_at, put_at + number) for _, put_at, number in item.stretches))
            for item in self._transfers(len(ranks), len(self._cell.ranks), shape[0])
            if item.receiver == self._position
        ]
        self._receipts[(index, backward)] = self._transport.receive(buffer, parts, step, index, backward)

    def _emit(
        self, tensor: torch.Tensor, at: Sequence[int], index: int, other: int, step: int, *, backward: bool
    ) -> None:
        rows, ranks = _rows(tensor, at), self._cells[self._pieces[other].cell].ranks
        for item in self._transfers(len(self._cell.ranks), len(ranks), rows.shape[0]):
            if item.sender == self._position:
                held = tuple((sent_from, sent_from + number) for sent_from, _, number in item.stretches)
                self._transport.send(taken(rows, held, 0), ranks[item.receiver], step, index, backward)

    def _transfers(self, senders: int, receivers: int, held: int) -> tuple[Transfer, ...]:
        """Return the messages of an edge. ``held``: positions of the sequence on this rank, all if it is not cut."""
        return boundary_transfers(senders, receivers, self._interface.cut_sequence() or SequenceCut(held))


def _timed(action: Action, work: Pass, result: PassResult) -> AbstractContextManager[None]:
    return result.measured.around(action, work.drag, work.aside)


def _rows(tensor: torch.Tensor, at: Sequence[int]) -> torch.Tensor:
    """Return rows ``at`` of ``[s, rows, h]``; the tensor itself if that is all of them."""
    if tuple(at) == tuple(range(tensor.shape[ROW_DIM])):
        return tensor
    return tensor.index_select(ROW_DIM, on_device(at, tensor.device))


def _positions(edge: Edge, backward: bool) -> tuple[int, ...]:
    return edge.source_at if backward else edge.target_at


def _weighted(output: LossOutput, piece: Piece, plan: Plan, work: Pass, result: PassResult) -> torch.Tensor:
    """Return the scalar whose gradient is this piece's share of the step's gradient, times the loss scale."""
    if work.per_token:
        if output.tokens is None:
            raise ConfigError(
                "--calculate-per-token-loss needs a loss function that returns (sum, tokens, report), but this one "
                "returns a mean: leave the flag out, or return the sum over tokens and their number"
            )
        loss = output.loss
    else:
        if len(piece.rows) != plan.grid.micro_batch_size:
            raise ConfigError(
                "a micro-batch was split between ranks, and the loss function returns only its mean: add "
                "--calculate-per-token-loss and return (sum over tokens, number of tokens, report)"
            )
        loss = output.loss if output.tokens is None else output.loss / torch.clamp(output.tokens, min=1)
        loss = loss / work.microbatches
        result.ledger.weights += 1.0 / work.microbatches
    return loss * work.loss_scale if work.loss_scale != 1.0 else loss
