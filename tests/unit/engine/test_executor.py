"""Pieces of one cell that follow each other hand tensors over inside it: no table has a transfer for them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NoReturn

import pytest
import torch

from megatron.elastic.engine.compute.device_numbers import on_device
from megatron.elastic.engine.compute.executor import Executor, Pass
from megatron.elastic.engine.compute.ledger import Expected
from megatron.elastic.engine.compute.model_interface import LossOutput
from megatron.elastic.engine.compute.point_to_point import BoundaryTransport, Unanswered
from megatron.elastic.engine.compute.samples import PieceBatch, StepAddress
from megatron.elastic.engine.compute.sequence_cut import SequenceCut
from megatron.elastic.observe.timeline import Timeline
from megatron.elastic.plan.model import Cell, Grid, Piece, Plan, Replica, Segment, Topology
from megatron.elastic.plan.planner import instant_plan
from megatron.elastic.plan.schedule.validate import validate_plan

UNITS, LENGTH, WIDTH, ROWS = 4, 3, 5, 8


@dataclass
class Layers:
    """A linear layer a unit; the loss is the sum of squares."""

    compute_units: int = UNITS
    layers: list[torch.nn.Linear] = field(default_factory=list)
    batch: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    weight: float = 0.0
    mean: bool = False
    """Report the mean of what else is a sum."""

    def forward(
        self, step: Any, piece: Piece, place: tuple[int, int], source: torch.Tensor | None, batches: Iterator[Any]
    ) -> torch.Tensor | LossOutput:
        x = self.batch.index_select(1, on_device(piece.rows, self.batch.device)) if source is None else source
        for layer in self.layers[piece.first : piece.end]:
            x = torch.tanh(layer(x))
        if piece.end < UNITS:
            return x
        loss = x.square().sum()
        reported = x.square().mean() if self.mean else loss
        return LossOutput(loss, torch.tensor(x.shape[0] * x.shape[1]), {"loss": reported.detach()})

    def boundary(self, rows: int) -> tuple[torch.Size, torch.dtype]:
        return torch.Size((LENGTH, rows, WIDTH)), torch.float32

    def cut_sequence(self) -> SequenceCut | None:
        """Cells do not cut the sequence."""
        return None

    def parameters_changed(self) -> None:
        """Layers keep nothing that was computed from parameters."""

    def weigh_layer_losses(self, weight: float) -> None:
        self.weight = weight

    def layer_losses(self) -> Mapping[str, tuple[float, float]]:
        return {"balance": (self.weight, 2.0)}

    def set_expert_bias(self, bias: Mapping[int, Sequence[float]]) -> None:
        """See :class:`ModelInterface`: there are no routers."""

    def expert_tokens(self) -> Mapping[int, Sequence[int]]:
        """See :class:`ModelInterface`: there are no experts."""
        return {}

    def set_scales(self, scales: Mapping[int, Sequence[float]]) -> None:
        """See :class:`ModelInterface`: nothing is in FP8."""

    def amaxes(self) -> Mapping[int, Sequence[float]]:
        """See :class:`ModelInterface`: nothing is in FP8."""
        return {}

    def ghost(self, piece: Piece, place: tuple[int, int]) -> torch.Tensor:
        raise AssertionError("no ranks share experts here")

    def deferring(self, piece: Piece) -> AbstractContextManager[Any]:
        raise AssertionError("no backward is split here")


class Nowhere(BoundaryTransport):
    """One cell is all there is."""

    def __init__(self) -> None:
        pass

    def send(self, *_: Any) -> NoReturn:
        raise AssertionError("sent to itself")

    def receive(self, *_: Any) -> NoReturn:
        raise AssertionError("received from itself")

    def flush(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def work(training: bool = True) -> Pass:
    def no_step(*_: Any) -> NoReturn:
        raise AssertionError("the port computes")

    ignore: Callable[..., None] = lambda *_: None
    address = StepAddress(ROWS * 3, ROWS)
    batches = lambda piece: PieceBatch.as_planned(address.samples(piece))
    return Pass(
        0,
        address,
        no_step,
        batches,
        lambda piece: nullcontext(),
        ignore,
        ignore,
        Timeline(),
        lambda units: nullcontext(),
        ignore,
        lambda: 0,
        per_token=True,
        training=training,
    )


def plan(*cuts: int) -> Plan:
    """One cell is left of two replicas; the lost one was cut at ``cuts``, so what it computed comes in pieces."""
    lost = tuple(Segment(1 + n, a, b) for n, (a, b) in enumerate(pairwise(cuts)))
    replicas = (Replica(lost), Replica((Segment(0, 0, UNITS),)))
    found = instant_plan(Topology(Grid(ROWS, 2, 2), UNITS, (Cell(0, (0,)),), replicas))
    validate_plan(found, UNITS)
    return found


def executor(interface: Any, found: Plan) -> Executor:
    return Executor(interface, Nowhere(), found, found.cells[0], 0, lambda *_: None)


def gradients(found: Plan, interface: Layers) -> tuple[list[torch.Tensor], float]:
    for layer in interface.layers:
        layer.zero_grad()
    result = executor(interface, found).run(work())
    assert sorted(result.rows) == list(range(ROWS))
    assert result.ledger.findings(Expected(range(3 * ROWS, 4 * ROWS), UNITS)) == []
    return [
        p.grad.clone() for layer in interface.layers for p in layer.parameters() if p.grad is not None
    ], result.tokens


@pytest.mark.parametrize(("per_token", "weight"), [(True, 8.0), (False, 2.0)])
def test_losses_of_layers_have_the_weight_of_the_steps_loss(per_token: bool, weight: float) -> None:
    """Times the loss scale, and without per-token loss a part of the micro-batches each."""
    interface = Layers(layers=[torch.nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)])
    interface.batch = torch.randn(LENGTH, ROWS, WIDTH)
    asked = replace(work(), loss_scale=8.0, per_token=per_token, microbatches=4.0)
    assert executor(interface, plan(0, UNITS)).run(asked).report["balance"] == (weight, 2.0)


@pytest.mark.parametrize("cuts", [(0, 2, 4), (0, 1, 2, 3, 4)], ids=str)
def test_gradients_are_those_of_whole_pieces(cuts: tuple[int, ...]) -> None:
    generator = torch.manual_seed(11)
    interface = Layers(layers=[torch.nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)])
    interface.batch = torch.randn(LENGTH, ROWS, WIDTH, generator=generator)
    assert plan(*cuts).edges and not plan(0, UNITS).edges, "every cut of the lost replica lies inside the cell"
    whole, tokens = gradients(plan(0, UNITS), interface)
    cut, tokens_cut = gradients(plan(*cuts), interface)
    assert tokens == tokens_cut == ROWS * LENGTH
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        reported = executor(interface, plan(*cuts)).run(work(training=False))
    assert set(reported.report) == {"loss"}, "layers add no losses where no gradient is computed"
    assert reported.report["loss"][1] == 4 and sorted(reported.rows) == list(range(ROWS))


def test_a_reported_mean_weighs_parts_of_a_micro_batch_by_their_rows() -> None:
    """The value logged is then the mean over micro-batches, however the rows of a lost rank are cut."""
    generator = torch.manual_seed(11)
    interface = Layers(layers=[torch.nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)], mean=True)
    interface.batch = torch.randn(LENGTH, 12, WIDTH, generator=generator)
    cells = tuple(Cell(number, (number,)) for number in range(3))
    replicas = tuple(Replica((Segment(number, 0, UNITS),)) for number in range(3))
    reported = []
    for living in (cells, cells[:2]):
        found = instant_plan(
            Topology(Grid(12, 4, 3), UNITS, living, replicas), dataflow="resize", cut_microbatches=True
        )
        passes = [Executor(interface, Nowhere(), found, cell, 0, lambda *_: None).run(work()) for cell in living]  # type: ignore[arg-type]
        values = [made.report["loss"] for made in passes]
        reported.append((sum(total for total, _ in values), sum(count for _, count in values)))
    assert {len(piece.rows) for piece in found.pieces} > {4}, "a micro-batch is cut"
    assert reported[0][1] == 3 and reported[1] == pytest.approx(reported[0], rel=1e-5)


class _Sent:
    """The work of a message that is sent at once."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


def test_messages_that_are_sent_keep_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage between two others sends two tensors a micro-batch; a step may have hundreds of micro-batches."""
    stages, rows = 3, 32
    cells = tuple(Cell(number, (number,)) for number in range(stages))
    replica = Replica(tuple(Segment(cell, first, end) for cell, (first, end) in enumerate(((0, 1), (1, 3), (3, 4)))))
    found = instant_plan(Topology(Grid(rows, 1, 1), UNITS, cells, (replica,)))
    shape, sent, alive = torch.Size((LENGTH, 1, WIDTH)), 0, set[int]()

    def isend(tensor: torch.Tensor, **_: Any) -> _Sent:
        nonlocal sent
        sent += 1
        if sent == 2 * rows:
            tensors = (found for found in gc.get_objects() if type(found) is torch.Tensor)
            alive.update(tensor.data_ptr() for tensor in tensors if tensor.shape == shape)
        return _Sent()

    monkeypatch.setattr("torch.distributed.isend", isend)
    interface = Layers(layers=[torch.nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)])
    transport = Unanswered(group=None, blocking=lambda peer: None)  # type: ignore[arg-type]
    monkeypatch.setattr(Unanswered, "send", BoundaryTransport.send)
    Executor(interface, transport, found, cells[1], 0, lambda *_: None).run(work())  # type: ignore[arg-type]
    assert 0 < len(alive) < 8, "those of the last micro-batch"
