"""One light process of an emulated job: everything is real but the kernels.

    python -m megatron.elastic.launch … tools/bench/emulated.py --elastic … --case JSON --second S --steps N --out DIR

Launcher, control plane, communicator, engine, state and plans are the runtime's
own; the engine's model is a row of units of a few parameters
whose forward and backward *wait* for as long as the cost profile says. Waits are
timed: each rank writes how long it asked for and how long it got (*dilation*).

Every rank holds the (tiny) state of every unit, so that any plan can run at once:
what is emulated is the throughput of plans and of the step around them, not the
migration of units.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from megatron.elastic.config import ElasticConfig
from megatron.elastic.control.requests import Request
from megatron.elastic.engine.compute.model_interface import (
    CellPlace,
    Covered,
    LossOutput,
    UnitParameter,
    only_at_launch,
)
from megatron.elastic.engine.compute.samples import StepAddress
from megatron.elastic.engine.compute.sequence_cut import SequenceCut
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.settings import Settings
from megatron.elastic.mcore.args.arguments import add_arguments, config_from_args
from megatron.elastic.plan.cost import PPM
from megatron.elastic.plan.model import Piece, Plan, Profile, Topology, UnitCost
from megatron.elastic.plan.topology import even_cuts
from megatron.elastic.runtime.assembly import EngineParts
from megatron.elastic.runtime.connect import open_links
from megatron.elastic.runtime.start import found
from megatron.elastic.simulate.cases import Case, answer
from megatron.elastic.simulate.scenarios import scenario_topology
from megatron.elastic.state.coverage import Position
from megatron.elastic.state.layout import ParamSpec, UnitShard
from megatron.elastic.state.record import ConstantSchedule, Hyper, Rate

WIDTH = 16
"""Parameters of a unit, and elements of a row."""
PATIENCE = 300.0
"""Seconds a wait for others may last."""


def _forward(unit: UnitCost) -> int:
    return unit.forward_ns


def _backward(unit: UnitCost) -> int:
    return unit.backward_ns


def _weight(unit: UnitCost) -> int:
    return unit.weight_grad_ns


def _input(unit: UnitCost) -> int:
    return unit.backward_ns - unit.weight_grad_ns


def _tell_nobody(unit: int) -> None:
    return None


@dataclass
class Waits:
    """Seconds asked for and seconds spent, over all waits of a process."""

    asked: float = 0.0
    spent: float = 0.0

    def wait(self, seconds: float) -> None:
        """Sleep, and note how long it really was."""
        before = time.monotonic()
        time.sleep(seconds)
        self.spent += time.monotonic() - before
        self.asked += seconds


@dataclass
class Deferred:
    """Weight gradients of a piece whose backward is split (``DeferredWeights``)."""

    model: EmulatedModel
    piece: Piece
    share: torch.Tensor | None = None

    def run(self, accumulate: Callable[[torch.nn.Parameter, torch.Tensor], None]) -> None:
        """Wait for the weight part, then hand the gradients over."""
        assert self.share is not None, "input gradients come first"
        self.model.waits.wait(self.model.seconds(self.piece, _weight))
        for unit in range(self.piece.first, self.piece.end):
            accumulate(self.model.parameters[unit], self.share)


class _Timed(torch.autograd.Function):
    """Rows pass with a mark of each unit; forward and backward wait."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, model: EmulatedModel, piece: Piece, *parameters: Any) -> torch.Tensor:
        ctx.model, ctx.piece, ctx.count = model, piece, len(parameters)
        model.waits.wait(model.seconds(piece, _forward))
        mark: torch.Tensor = sum((parameter.mean() for parameter in parameters), start=torch.zeros(()))
        return rows + mark

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        share, later = (gradients[0].sum() / WIDTH).expand(WIDTH), ctx.model.deferred
        if later is not None:
            ctx.model.waits.wait(ctx.model.seconds(ctx.piece, _input))
            later.share = share
            return gradients[0], None, None, *(None for _ in range(ctx.count))
        ctx.model.waits.wait(ctx.model.seconds(ctx.piece, _backward))
        return gradients[0], None, None, *(share for _ in range(ctx.count))


@dataclass
class EmulatedModel:
    """Units that wait (``ModelInterface``)."""

    profile: Profile
    second: float
    """Seconds that one ns of the profile lasts."""
    tensor: int = 1
    """Tensor-parallel size at launch; a cell of fewer ranks waits as much longer."""
    waits: Waits = field(default_factory=Waits)
    deferred: Deferred | None = None
    """Where weight gradients go while a backward is split."""

    def __post_init__(self) -> None:
        self.told: Callable[[int], None] = _tell_nobody
        self.compute_units = len(self.profile.units)
        self.parameters = [torch.nn.Parameter(torch.zeros(WIDTH)) for _ in self.profile.units]
        self.ranks = self.tensor

    def seconds(self, piece: Piece, part: Callable[[UnitCost], int]) -> float:
        """Duration of that part of ``piece``."""
        whole = sum(map(part, self.profile.units[piece.first : piece.end])) * len(piece.rows) * self.second
        return whole * self.tensor / self.ranks

    def ghost(self, piece: Piece, place: tuple[int, int]) -> torch.Tensor:
        """See ``ModelInterface``."""
        raise AssertionError("no ranks share experts here")

    @contextmanager
    def deferring(self, piece: Piece) -> Iterator[Deferred]:
        """See ``ModelInterface``."""
        self.deferred = Deferred(self, piece)
        try:
            yield self.deferred
        finally:
            self.deferred = None

    def prepare(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """Nothing has to be built."""

    def hold(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """Every unit is held, always; the number of ranks that share it may change."""
        self.ranks = self.tensor if place is None else place.position.count

    def largest_part(self, tensor: int, parts: int, parameters: Collection[ParamSpec]) -> int | None:
        """See :class:`ModelInterface`: ranks share a layer evenly, in any number."""
        return None if self.tensor == 1 or parts > 1 else PPM // tensor

    def refusal(self, tensor: int, parts: int, stages: int) -> str:
        """See :class:`ModelInterface`."""
        return ""

    def objection(self, parts: int) -> str:
        """See :class:`ModelInterface`."""
        return ""

    def overlaps(self, spec: ParamSpec, place: Any) -> None:
        """See ``ModelInterface``: every parameter is one shard's."""

    def covered(self, unit: int, position: Position) -> tuple[int, ...]:
        """See ``ModelInterface``: a cell is one rank, or all its ranks hold the whole (tiny) unit."""
        return only_at_launch(unit, position) if self.tensor == 1 else ()

    def held_units(self) -> tuple[int, ...]:
        """All."""
        return tuple(range(self.compute_units))

    def unit_parameters(self, unit: int) -> Sequence[UnitParameter]:
        """One tensor."""
        return [UnitParameter(ParamSpec("weight", WIDTH, (WIDTH,), False), self.parameters[unit])]

    def boundary(self, rows: int) -> tuple[torch.Size, torch.dtype]:
        """``[1, rows, WIDTH]``."""
        return torch.Size((1, rows, WIDTH)), torch.float32

    def cut_sequence(self) -> SequenceCut | None:
        """Cells do not cut the sequence."""
        return None

    def activation_bytes(self, unit: int) -> int:
        """Duration of a row at the boundary."""
        return 4 * WIDTH

    def quantized_bytes(self, spec: ParamSpec) -> int:
        """See :class:`ModelInterface`: nothing is in FP8."""
        return 0

    def used_ppm(self, spec: ParamSpec) -> int:
        """See :class:`ModelInterface`: every position multiplies every matrix."""
        return PPM

    def forward(
        self, step: Any, piece: Piece, place: tuple[int, int], source: torch.Tensor | None, batches: Iterator[Any]
    ) -> torch.Tensor | LossOutput:
        """Wait; the last segment's loss is the mean of its input."""
        for unit in range(piece.first, piece.end):
            self.told(unit)
        rows = torch.zeros(self.boundary(len(piece.rows))[0]) if source is None else source
        parameters = self.parameters[piece.first : piece.end]
        output: torch.Tensor = _Timed.apply(rows, self, piece, *parameters)  # type: ignore[no-untyped-call]
        if piece.end < self.compute_units:
            return output
        loss = output.mean()
        return LossOutput(loss, None, {"loss": loss.detach()})

    def separate_uses(self, contribute: Callable[[int, str, torch.Tensor], None]) -> None:
        """No weight is shared."""

    def parameters_changed(self) -> None:
        """Nothing is kept of parameters."""

    def weigh_layer_losses(self, weight: float) -> None:
        """No layer has a loss of its own."""

    def layer_losses(self) -> Mapping[str, tuple[float, float]]:
        """No layer has a loss of its own."""
        return {}

    @contextmanager
    def announcing(self, told: Callable[[int], None]) -> Iterator[None]:
        """See ``ModelInterface``."""
        self.told = told
        try:
            yield
        finally:
            self.told = _tell_nobody

    def reads_data(self) -> bool:
        """Nothing is read."""
        return False

    def takes_batch(self, piece: Piece) -> bool:
        """Nothing is read."""
        return False

    def finish_gradients(self, grads: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Cells are single ranks: nothing to complete."""

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

    def train(self, mode: bool) -> None:
        """Nothing to switch."""


class Everywhere(Assignment):
    """Every rank holds every unit's state (see the module docstring)."""

    def units_of(self, rank: int) -> tuple[int, ...]:
        """All."""
        return tuple(range(self.launch_topology.compute_units))

    def state_groups(self, covered: Covered = only_at_launch) -> dict[UnitShard, tuple[int, ...]]:
        """One group of all ranks a unit."""
        shard = self.launch_topology.common or 0
        ranks = tuple(range(self.launch_topology.slots))
        return {(unit, shard): ranks for unit in range(self.launch_topology.compute_units)}


def emulated_job(case: Case, second: float, config: ElasticConfig) -> tuple[EngineParts, EmulatedModel]:
    """The parts of the engine, and the model that keeps the time: ``second`` of it for a ns of the profile."""
    scenario = case.scenario
    whole, _ = scenario_topology(scenario)
    memory = whole.cells[0].memory_bytes
    stages = tuple(pairwise(even_cuts(scenario.layers, scenario.pp)))
    interface = EmulatedModel(case.profile, second, scenario.tp)
    launch_topology = LaunchTopology(scenario.tp, scenario.pp, scenario.dp, stages, whole.grid)

    def choose(topology: Topology, profile: Profile) -> Plan:
        cells = tuple(replace(cell, memory_bytes=memory * cell.nominal_ppm // PPM) for cell in topology.cells)
        return answer(case.policy, replace(topology, cells=cells), profile)

    job = EngineParts(
        interface=interface,
        launch_topology=launch_topology,
        config=config,
        settings=Settings(0, Hyper(ConstantSchedule((Rate(0.0, 0.0),))), communication_timeout=PATIENCE),
        on_settled=lambda outcome, view, seconds: None,
        host_state=str,
        on_notice=lambda text: print(text, flush=True),
        choose=choose,
        profile=case.profile,
        assignment=Everywhere(launch_topology, Assignment.at_launch(launch_topology).replicas),
    )
    return job, interface


def no_forward_step(batches: Iterator[Any], model: Any) -> Any:
    """The engine's interface to the model, which waits instead of computing."""
    raise AssertionError("an emulated unit computes nothing")


def main() -> None:
    """Train ``--steps`` steps as one rank."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--case", type=Case.from_json, required=True)
    parser.add_argument("--second", type=float, required=True, help="seconds that one ns of the profile lasts")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = config_from_args(args)
    job, model = emulated_job(args.case, args.second, config)
    links = open_links(config, PATIENCE)
    engine = found(links, job)
    engine.resume(engine.record, None)
    links.membership.request(Request.BEGIN)
    rows = job.launch_topology.grid.global_batch_size
    log = []
    for step in range(args.steps):
        before, started = replace(model.waits), time.monotonic()
        engine.step(no_forward_step, None, StepAddress(step * rows, rows))
        ended, waits = time.monotonic(), model.waits
        log.append((started, ended, waits.asked - before.asked, waits.spent - before.spent))
    (args.out / f"waits-{links.fabric.rank}.json").write_text(json.dumps(log))
    links.membership.finish(0)


if __name__ == "__main__":
    main()
