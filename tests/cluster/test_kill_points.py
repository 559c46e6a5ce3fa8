"""One rank is killed at a named point, each point and each rank: what follows is the run that was not disturbed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.elastic.engine.inject import STEP_POINTS
from tests.cluster.checks import check
from tests.cluster.cluster import run
from tests.scenario.scenario import parse

POINTS = (*STEP_POINTS, "between_steps", "in_evaluate")


def test_undisturbed() -> None:
    cluster = run("")
    check(cluster, settled=True)
    assert len(cluster.finished) == 4 and not any(process.recoveries for process in cluster.processes)


def test_a_run_is_a_function_of_its_seed() -> None:
    scenario = parse("seed=5 kill:rank=1,step=2,point=mid_reduce")
    one, same, other = run(scenario), run(scenario), run(replace(scenario, seed=6))
    assert (one.scheduler.turns, one.journal.entries) == (same.scheduler.turns, same.journal.entries)
    assert one.journal.entries != other.journal.entries


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("point", POINTS)
def test_kill(point: str, rank: int) -> None:
    """Three ranks finish; who comes back is looked at elsewhere."""
    cluster = run(f"steps=3 seed={rank} back=never kill:rank={rank},step=2,point={point}")
    assert {process.rank for process in cluster.finished} == set(range(4)) - {rank}
    assert all(process.recoveries for process in cluster.finished)
    check(cluster, settled=True)
