"""One rank of ``tools/bench/overlap.py``: the engine over units of real size whose kernels are timed waits.

Data parallel, one stage. Each unit's forward and backward wait for their share of a piece, one after the other as in a
device's queue; gradients, state, parameters and what moves of them have their full size. Writes ``rank-R.json``: for
each step its seconds, those of its waits, and those by phase.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.elastic.control.requests import Request
from megatron.elastic.engine.compute.model_interface import LossOutput, UnitParameter
from megatron.elastic.engine.compute.samples import StepAddress
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.settings import Settings
from megatron.elastic.engine.transaction.listener import Listener, Stepped
from megatron.elastic.mcore.args.arguments import add_arguments, config_from_args
from megatron.elastic.plan.model import Grid, Piece, Profile, UnitCost
from megatron.elastic.runtime.assembly import EngineParts
from megatron.elastic.runtime.connect import open_links
from megatron.elastic.runtime.start import found
from megatron.elastic.state.layout import ParamSpec
from megatron.elastic.state.record import ConstantSchedule, Hyper, Rate, StepRecord
from tools.bench.emulated import PATIENCE, EmulatedModel, Waits, no_forward_step

COST = UnitCost(1, 2, 1, 1, 1, 1, 1)
"""Of a unit and row: a backward takes twice as long as a forward."""


@dataclass
class Queue(Waits):
    """Waits of kernels that are queued ahead: what the host does between two delays the second only if it takes longer.

    So the host's work in a hook runs beside a kernel, as it does where kernels are launched before the hook is called.
    """

    ended: float = 0.0
    """When the last kernel ended; seconds of the monotonic clock."""

    def begin(self) -> None:
        """Nothing is queued: the next kernel begins when it is launched."""
        self.ended = time.monotonic()

    def wait(self, seconds: float) -> None:
        """Sleep until the next kernel has ended, and note how long it ran."""
        now = time.monotonic()
        began = max(self.ended, now - seconds)
        time.sleep(max(0.0, began + seconds - now))
        self.ended = time.monotonic()
        self.spent += self.ended - began
        self.asked += seconds


class _Unit(torch.autograd.Function):
    """Rows pass with a mark of the unit; forward and backward wait."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, model: TimedUnits, parameter: torch.Tensor) -> torch.Tensor:
        ctx.model, ctx.count = model, parameter.numel()
        model.waits.wait(model.second * COST.forward_ns)
        return rows + parameter[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.model.waits.wait(ctx.model.second * COST.backward_ns)
        return gradients[0], None, gradients[0].sum().expand(ctx.count)


@dataclass
class TimedUnits(EmulatedModel):
    """Units of ``elements`` parameters (``ModelInterface``)."""

    elements: int = 1
    waits: Queue = field(default_factory=Queue)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameters = [torch.nn.Parameter(torch.zeros(self.elements)) for _ in self.profile.units]

    def unit_parameters(self, unit: int) -> Sequence[UnitParameter]:
        """One tensor."""
        spec = ParamSpec("weight", self.elements, (self.elements,), False)
        return [UnitParameter(spec, self.parameters[unit])]

    def forward(
        self, step: Any, piece: Piece, place: tuple[int, int], source: torch.Tensor | None, batches: Iterator[Any]
    ) -> torch.Tensor | LossOutput:
        """Wait, unit by unit."""
        rows: torch.Tensor = torch.zeros(self.boundary(len(piece.rows))[0]) if source is None else source
        self.waits.begin()
        for unit in range(piece.first, piece.end):
            self.told(unit)
            rows = _Unit.apply(rows, self, self.parameters[unit])  # type: ignore[no-untyped-call]
        loss = rows.mean()
        return LossOutput(loss, None, {"loss": loss.detach()})


class Times(Listener):
    """Keeps what the engine tells of each step."""

    def __init__(self) -> None:
        self.steps: list[Stepped] = []

    def stepped(self, record: StepRecord, view: View, step: Stepped) -> None:
        """Keep it."""
        self.steps.append(step)


def main() -> None:
    """Train ``--steps`` steps as one rank."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for name in ("ranks", "units", "elements", "pieces", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--piece-ms", type=float, required=True, help="forward of a piece")
    parser.add_argument("--out", type=Path, required=True)
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = config_from_args(args)
    model = TimedUnits(Profile((COST,) * args.units), args.piece_ms / 1e3 / args.units, elements=args.elements)
    rows = args.pieces * args.ranks
    parts = EngineParts(
        interface=model,
        launch_topology=LaunchTopology(1, 1, args.ranks, ((0, args.units),), Grid(rows, 1, args.ranks)),
        config=config,
        settings=Settings(0, Hyper(ConstantSchedule((Rate(1e-3, 0.0),))), communication_timeout=PATIENCE),
        on_settled=lambda outcome, view, seconds: None,
        host_state=str,
        on_notice=lambda text: print(text, flush=True),
        profile=model.profile,
    )
    links = open_links(config, PATIENCE)
    engine = found(links, parts)
    engine.context.listener = times = Times()
    engine.resume(engine.record, None)
    links.membership.request(Request.BEGIN)
    log = []
    for step in range(args.steps):
        waited, began, busy = model.waits.spent, time.monotonic(), time.process_time()
        engine.step(no_forward_step, None, StepAddress(step * rows, rows))
        seconds, busy = time.monotonic() - began, time.process_time() - busy
        phases = {name: spent / 1e9 for name, spent in times.steps[-1].phases.items()}
        log.append({"seconds": seconds, "waited": model.waits.spent - waited, "busy": busy, "phases": phases})
    engine.parameter_norm()
    (args.out / f"rank-{links.fabric.rank}.json").write_text(json.dumps(log))
    links.membership.finish(0)


if __name__ == "__main__":
    main()
