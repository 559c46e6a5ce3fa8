"""The peers' model computes the same under every layout, and goes on from a checkpoint that all of its parts have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tools.bench._common import Here, Ranks
from tools.bench.peers_programs import common, parts
from tools.bench.peers_programs.layouts import LAYOUTS

RANKS, STEPS, ROWS = 4, 3, 8


def samples_of(step: int) -> torch.Tensor:
    """A small global batch."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(common.VOCABULARY, (ROWS, common.SEQUENCE + 1), generator=generator)


def trained(here: Here, name: str) -> list[tuple[float, float]]:
    """The losses of some steps under a layout, as (rows, mean loss): no rows where the rank has none to tell."""
    dist.init_process_group("gloo", store=here.store(), rank=here.rank, world_size=here.size)
    place = parts.Place(LAYOUTS[name], here.rank, here.size)
    inside, across = parts.groups_of(place, None)
    part = parts.part_of(place, inside)
    optimizer = common.optimizer_of(part.model)
    parallel = torch.nn.parallel.DistributedDataParallel(part.model, process_group=across)
    told = []
    for step in range(STEPS):
        samples = samples_of(step)[place.replica :: place.replicas]
        optimizer.zero_grad()
        loss = parts.backward(part, parallel, samples, place.replicas)
        optimizer.step()
        told.append((float(len(samples)) if part.has_loss else 0.0, loss))
    dist.barrier()
    dist.destroy_process_group()
    return told


def whole_losses() -> list[float]:
    """The losses of one process with the whole model."""
    part = parts.Part(common.Gpt())
    optimizer, losses = common.optimizer_of(part.model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(parts.backward(part, part.model, samples_of(step), 1))
        optimizer.step()
    return losses


def test_every_layout_makes_the_steps_of_the_whole_model() -> None:
    torch.set_num_threads(1)
    expected = whole_losses()
    assert expected[2] < expected[0] - 0.01, "three steps change the loss by far more than rounding does"
    for name in LAYOUTS:

        def body(here: Here, name: str = name) -> list[tuple[float, float]]:
            return trained(here, name)

        with Ranks(RANKS, body, seconds=60.0) as ranks:
            told: dict[int, Any] = ranks.results(range(RANKS))
        for step in range(STEPS):
            rows = [told[rank][step] for rank in range(RANKS)]
            mean = sum(count * loss for count, loss in rows) / sum(count for count, _ in rows)
            assert mean == pytest.approx(expected[step], rel=1e-5), f"{name}, step {step}"


def resumed(here: Here, folder: Path) -> tuple[int, float]:
    """Save steps 1 and 2, on part 1 also step 3; return the step that is gone on from and a weight of it."""
    dist.init_process_group("gloo", store=here.store(), rank=here.rank, world_size=here.size)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = parts.Checkpoints(folder, parts.Place(LAYOUTS["tp2dp2"], here.rank, here.size))
    fresh = checkpoints.load(model, optimizer)
    assert fresh == 0
    for step in range(1, 3 + here.rank):
        torch.nn.init.constant_(model.weight, float(step))
        checkpoints.save(model, optimizer, step)
    step = checkpoints.load(model, optimizer)
    dist.destroy_process_group()
    return step, float(model.weight)


def test_a_part_that_is_a_step_ahead_goes_back_to_the_step_that_all_have(tmp_path: Path) -> None:
    with Ranks(2, lambda here: resumed(here, tmp_path), seconds=30.0) as ranks:
        assert ranks.results(range(2)) == {0: (2, 2.0), 1: (2, 2.0)}
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["checkpoint0.1.pt", "checkpoint0.2.pt", "checkpoint1.2.pt", "checkpoint1.3.pt"]
