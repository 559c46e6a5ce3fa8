"""A newcomer goes through its admission before it comes: the real engine's parts, and nothing of it is left.

One process, never linked to anybody, as a returning rank is until it is admitted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch

from megatron.elastic.comm.backend import install
from megatron.elastic.comm.native import NativeFabric
from megatron.elastic.config import ElasticConfig
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.compute.model_interface import LossOutput, UnitParameter
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.state_catalog import build_layouts, built, own_catalog
from megatron.elastic.engine.inject import Injector
from megatron.elastic.engine.settings import Settings
from megatron.elastic.engine.transaction.certificates import CertificateOutcome, Examination
from megatron.elastic.observe.events import EventLog, read_events
from megatron.elastic.plan.model import Grid, Piece, Profile, UnitCost
from megatron.elastic.runtime.assembly import EngineParts
from megatron.elastic.runtime.connect import Links
from megatron.elastic.runtime.warm_up import rehearse
from megatron.elastic.state.record import ConstantSchedule, Hyper, Rate
from tools.bench._common import Here, Ranks
from tools.bench.emulated import EmulatedModel

UNITS = 8


class OfAStage(EmulatedModel):
    """Layers of ``units`` alone, of which each has values of its own. Says with which it computed what ``ran``."""

    units: Sequence[int] = ()
    bare: Sequence[int] = ()
    stumbles = False

    def forward(self, step: Any, piece: Piece, *given: Any) -> torch.Tensor | LossOutput:
        output = super().forward(step, piece, *given)
        step(iter(()), [(unit, piece.rows) for unit in range(piece.first, piece.end)])
        if self.stumbles:
            raise RuntimeError("no such kernel")
        return output

    def held_units(self) -> tuple[int, ...]:
        return tuple(self.units)

    def unit_parameters(self, unit: int) -> Sequence[UnitParameter]:
        return () if unit in self.bare else super().unit_parameters(unit)


def _job(nominal: LaunchTopology, rank: int, config: ElasticConfig, bare: Sequence[int]) -> EngineParts:
    interface = OfAStage(Profile((UnitCost(1, 1, 1, 1, 1, 1, 1),) * UNITS), 0.0)
    place = nominal.place(rank) or (0, 0, 0)  # a spare borrows that of a first stage
    interface.units, interface.bare = tuple(range(*nominal.chunks[place[2]])), bare
    for unit in interface.units:
        interface.parameters[unit].data.uniform_(-1, 1, generator=torch.Generator().manual_seed(unit))
    settings = Settings(0, Hyper(ConstantSchedule((Rate(0.0, 0.0),))))
    return EngineParts(interface, nominal, config, settings, lambda *_: None, str, pytest.fail)


def _rehearsed(here: Here) -> dict[str, Any]:
    """Once, in a slot of a job that others train; then what was heard, logged, loaded and changed by a second time."""
    tensor, pipeline, data, rank, bare, folder = here.ask()
    stages = tuple((UNITS * stage // pipeline, UNITS * (stage + 1) // pipeline) for stage in range(pipeline))
    nominal = LaunchTopology(tensor, pipeline, data, stages, Grid(4 * data, 1, data), extra=tensor)
    fabric = NativeFabric(rank, nominal.slots + nominal.extra, 1, run_id="alone", secret=b"x" * 32)
    install(fabric)
    job = _job(nominal, rank, ElasticConfig(event_log=folder), bare)
    links = Links(cast(Any, None), fabric, EventLog(folder, rank, 1), Injector((), rank, 1), None)
    catalog = own_catalog(job.interface, nominal, rank)
    layouts = build_layouts(catalog, job.config.block_bytes)
    arena = Arena(job.interface, layouts, built(job.interface, catalog, nominal, rank))
    before, storage = arena.parameters.clone(), arena.parameters.data_ptr()
    verdicts = list[CertificateOutcome]()
    complete = Examination.complete
    with mock.patch.object(Examination, "complete", lambda self: verdicts.append(complete(self))):
        ran = list[tuple[int, tuple[int, ...]]]()
        seconds = [rehearse(links, job, catalog, arena, cast(Any, lambda _, units: ran.extend(units)))]
        loaded = set(sys.modules)
        seconds += [rehearse(links, job, catalog, arena)]
        cast(OfAStage, job.interface).stumbles = True
        seconds += [rehearse(links, job, catalog, arena, cast(Any, lambda *_: None))]
    return {
        "ran": ran,
        "rehearsed": [spent is not None for spent in seconds],
        "gradients": int(arena.gradients.count_nonzero()),
        "same": torch.equal(before, arena.parameters) and storage == arena.parameters.data_ptr(),
        "alive": fabric.alive,
        "loaded later": sorted(set(sys.modules) - loaded),
        "certificates": len(verdicts),
        "findings": any("rank" in finding for finding in verdicts[0].findings),
    }


@pytest.mark.parametrize("bare", [(), (0,)], ids=["", "no parameters in the first unit"])
@pytest.mark.parametrize(
    ("tensor", "pipeline", "data", "rank"), [(1, 1, 4, 1), (1, 2, 2, 3), (2, 2, 2, 5), (2, 2, 2, 9)]
)
def test_a_newcomer_or_a_spare_rehearses_in_any_place_of_any_layout_and_leaves_no_trace(
    tmp_path: Path, tensor: int, pipeline: int, data: int, rank: int, bare: tuple[int, ...]
) -> None:
    with Ranks(1, _rehearsed) as ranks:
        ranks.say(0, (tensor, pipeline, data, rank, bare, str(tmp_path)))
        told = ranks.results([0])[0]
    assert told["same"] and told["alive"] == (rank,)
    assert told["loaded later"] == []
    place = 0 if rank >= tensor * pipeline * data else rank // (tensor * data)
    held = range(UNITS * place // pipeline, UNITS * (place + 1) // pipeline)
    assert sorted(unit for unit, _ in told["ran"]) == list(held), "one micro-batch passes each layer of its stage"
    assert all(len(rows) == 1 for _, rows in told["ran"])
    assert told["rehearsed"] == [True, False, False] and told["gradients"] == 0
    assert told["certificates"] == 3 and told["findings"], "statements are compared, and the others' are missed"
    assert list(read_events(tmp_path)) == []
