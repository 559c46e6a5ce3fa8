"""One rank logs for all: what it logs is logged though it is lost, by the one that takes its place."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron.elastic.engine.inject import STEP_POINTS
from tests.cluster.checks import check
from tests.cluster.cluster import Program, RankProcess, run

STEPS = 4


def logged(scenario: str) -> Counter[int]:
    """Run a scenario; return the steps behind which a fenced action logged, and how often each."""
    lines = Counter[int]()

    def log(rank: RankProcess, step: int) -> None:
        engine = rank.engine
        assert engine is not None

        def body() -> None:
            if engine.is_reporter and not engine.behind:
                lines[step] += 1

        engine.fenced(body, reads_parameters=False)

    check(run(scenario, Program(fenced=log)))
    return lines


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("point", STEP_POINTS)
def test_each_step_is_logged_though_the_rank_that_logs_is_lost(point: str, seed: int) -> None:
    """The other ranks may have done their part of the action, which is to log nothing."""
    back = ("never", "soon")[seed % 2]
    lines = logged(f"dp2 steps={STEPS} seed={seed} back={back} kill:rank=1,step=3,point={point}")
    assert lines.keys() == set(range(1, STEPS + 1))


def test_a_line_is_logged_once_where_a_rank_is_lost_that_does_not_log() -> None:
    lines = logged(f"pp2dp2 steps={STEPS} seed=0 back=never kill:rank=0,step=3,point=after_gather")
    assert lines == dict.fromkeys(range(1, STEPS + 1), 1)
