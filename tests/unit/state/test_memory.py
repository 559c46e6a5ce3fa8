"""The bytes a parameter: sums, and the pool's own count."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron.elastic.config import ElasticConfig
from megatron.elastic.engine.generation.hardware import OwnerMemory
from megatron.elastic.runtime.owner_memory import lines, training_of
from megatron.elastic.state.layout import ParamSpec, UnitLayout
from megatron.elastic.state.memory import Training, memory_rows
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord, Vote, advance
from tools.memory_table import CASES

RATES = (Rate(1e-2, 0.1),)


def each(training: Training) -> dict[str, tuple[float, float]]:
    return {row.name: (row.each.device, row.each.host) for row in memory_rows(training)}


@pytest.mark.parametrize("snapshot", ["gradient", "state"])
def test_the_pool_holds_the_bytes_that_the_table_names(snapshot):
    layout = UnitLayout.build(0, 0, [ParamSpec("weight", 4096, (64, 64), True, 1.0)], 4096)
    pool = StatePool(0, {(0, 0): layout}, Hyper(ConstantSchedule(RATES)), snapshot)
    owned, mirrored = layout.blocks[0], layout.blocks[1]
    for block in (owned, mirrored):
        pool.put(block.key, torch.ones(block.numel), 0)
    pool.retain(owned.key, GradientKey(0, 1), torch.ones(owned.numel))
    if snapshot == "gradient":  # the mirror has accepted one step and waits for the next one's vote
        pool.retain(mirrored.key, GradientKey(0, 1), torch.ones(mirrored.numel))
        before = StepRecord.initial(pool.hyper)
        vote = Vote(GradientKey(0, 1), [1.0], False, 1.0, 1.0, 8, rates=RATES)
        pool.apply(advance(before, vote, pool.hyper), unread=(mirrored.key,))
        for block in (owned, mirrored):
            pool.retain(block.key, GradientKey(1, 1), torch.ones(block.numel))
    else:
        for block in (owned, mirrored):
            pool._keep_previous(pool.get(block.key))
    training = Training(1, 1, itemsize=2, mirrors=1, on_device=False, snapshot=snapshot)
    expected = training.owner.host * owned.numel + training.mirror.host * mirrored.numel
    assert pool.bytes_held() == expected


def test_owners_on_a_device_take_four_bytes_more_than_megatrons():
    rows = each(Training(1 << 30, 8, itemsize=2, mirrors=1, on_device=True))
    assert rows["in all"] == (6 + 16 / 8, 8 / 8 + 20 / 8)
    assert rows["Megatron, distributed optimizer"] == (6 + 12 / 8, 0)
    host = each(Training(1 << 30, 8, itemsize=2, mirrors=1, on_device=False))
    assert host["in all"] == (6, 36 / 8)


def test_on_a_cpu_all_memory_is_the_hosts():
    rows = each(Training(100, 2, itemsize=4, mirrors=2, on_device=False, accelerator=False))
    assert all(device == 0 for device, _ in rows.values())
    assert (
        rows["in all"][1] == 8 + (12 + 2 * 4) / 2 + 2 * 20 / 2
        and rows["Megatron, distributed optimizer"][1] == 8 + 8 / 2
    )


@pytest.mark.parametrize(("slots", "spares", "mirrors"), [(1, 0, 0), (2, 0, 1), (1, 2, 2), (8, 0, 2)])
def test_a_rank_keeps_copies_of_as_many_others_as_there_are(slots, spares, mirrors):
    grid = SimpleNamespace(data_parallel_size=1)
    topology = cast(Any, SimpleNamespace(grid=grid, slots=slots))
    arena = cast(Any, SimpleNamespace(state_stop=10, dtype=torch.float32, device=torch.device("cpu")))
    config = ElasticConfig(mirrors=2, spares=spares)
    assert training_of(config, topology, arena, OwnerMemory()).mirrors == mirrors


def test_sums_of_exact_mode_lie_beside_the_gradients():
    usual = Training(100, 2, itemsize=4, mirrors=1, on_device=True)
    plain, exact = each(usual), each(replace(usual, exact=True))
    assert exact["sums of exact mode"] == (8, 0) and "sums of exact mode" not in plain
    assert exact["in all"] == (plain["in all"][0] + 8, plain["in all"][1])


def test_the_printed_table_has_a_line_for_each_row():
    text = list(lines(Training(1 << 30, 8, itemsize=2, mirrors=1, on_device=True)))
    assert len(text) == 7 and "1,073,741,824" in text[0] and "8.00" in text[5]


def test_the_models_of_the_docs_have_their_sizes():
    sizes = {case.name: round(case.parameters / 1e9, 2) for case in CASES}
    assert sizes == {"Llama-3 8B": 8.03, "GPT-3 175B": 174.6}
