"""``--elastic-inject``: whatever way a rank fails, as scripted or by a seeded die, the others go on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.elastic.engine.inject import STEP_POINTS, Injector
from megatron.elastic.engine.inject import parse as parse_faults
from tests.integration.elastic_job import elastic_job, largest_deviation
from tests.integration.kill_walk import DROPOUT, LAYOUTS, TWO, walk
from tests.scenario.scenario import parse

KINDS = ("stop", "exit", "raise", "oom")


@pytest.mark.slow
def test_a_rank_that_is_stopped_exits_raises_or_runs_out_of_memory_is_replaced(tmp_path: Path) -> None:
    cases = [parse(f"{kind}:rank={rank},losses=0,point=mid_backward") for rank, kind in enumerate(KINDS)]
    walk(tmp_path, LAYOUTS["pp2dp2"], cases)


STEPS, SEED, RATE = 12, 4, 0.06


def scripted(script: str, ranks: int) -> dict[int, int]:
    """Rank → step in which the die says that its first life ends."""
    found: dict[int, int] = {}
    for rank in range(ranks):
        injector = Injector(parse_faults(script), rank)
        (fault,) = parse_faults(script)
        hit = next((step for step in range(1, STEPS + 1) if injector._draw(fault, step) is not None), None)
        if hit is not None:
            found[rank] = hit
    return found


@pytest.mark.slow
def test_random_faults_are_the_same_for_a_seed_and_cost_no_step(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    layout, points = LAYOUTS["pp2dp2"], "|".join(STEP_POINTS)
    script = f"random:seed={SEED},rate={RATE},kinds=kill|exit|stop,points={points}"
    expected = scripted(script, layout.ranks)
    assert len(expected) == layout.ranks, "a seed that hits each rank once"
    job = (layout.ranks, layout.tensor, layout.pipeline, STEPS, *DROPOUT, *TWO)
    whole = elastic_job(tmp_path / "whole", *job)
    hit = elastic_job(tmp_path / "hit", *job, "--elastic-allow-inject", "--elastic-inject", script)
    assert whole.code == hit.code == 0, hit.output[-6000:]
    happened = {int(rank): int(step) for rank, step in re.findall(r"injected \w+: rank (\d+), step (\d+)", hit.output)}
    assert happened == expected
    assert all(record.fields["lost_steps"] == 0 for record in hit.of("recovery"))
    assert set(hit.committed) == set(whole.committed)
    assert largest_deviation(whole.committed, hit.committed) < 1e-5
