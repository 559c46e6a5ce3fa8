"""Ranks that share experts lose some of them in the same step, whatever sizes their groups have, and have them again.

The ranks with all experts together are those of several cells, of one, or some of a cell; an expert is whole on one
rank, or cut. The ranks of a cell share the sequence.
"""

from __future__ import annotations

import pytest

from megatron.elastic.control.requests import ParallelSizes
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.inject import STEP_POINTS
from tests.cluster.checks import check, undisturbed
from tests.cluster.cluster import Cluster, Program, RankProcess, run
from tests.cluster.routed_model import EXPERTS

SIZES: dict[str, tuple[str, tuple[int, int]]] = {
    "two cells of one rank": ("dp4", (2, 1)),
    "two cells of one rank, in two stages": ("pp2dp2", (2, 1)),
    "a cell": ("tp2dp2", (2, 1)),
    "a cell, in two stages": ("tp2pp2dp1", (2, 1)),
    "two cells": ("tp2dp2", (4, 1)),
    "two cells, each expert cut": ("tp2dp2", (2, 2)),
    "half a cell": ("tp4dp2", (2, 1)),
}
"""Name → layout, whose tensor size is the number of parts of a sequence, and (sets of experts, ranks with a part)."""
POINTS = (*STEP_POINTS, "between_steps", "in_evaluate")
CASES = [(name, point, rank) for name in SIZES for point in POINTS for rank in range(4)]
SAMPLE = [(tuple(SIZES)[at % len(SIZES)], point, at % 4) for at, point in enumerate(POINTS)][::5]
"""Each point, with other sizes and another rank."""


def loses(name: str, *words: str) -> Cluster:
    """The cluster after a run in which no committed step was lost and each sample counted once."""
    layout, experts = SIZES[name]
    scenario = f"{layout} steps=6 micro_batches=4 mirrors=2 {' '.join(words)}"
    cluster = run(scenario, Program(parts=True, experts=experts))
    check(cluster)
    assert all(outcome.lost_steps == 0 for process in cluster.processes for outcome in process.recoveries)
    ledger = engine_of(undisturbed(cluster.scenario, parts=True, experts=experts)).record.ledger_hash
    assert {engine_of(process).record.ledger_hash for process in cluster.finished} == {ledger}
    return cluster


def engine_of(process: RankProcess) -> Engine:
    assert process.engine is not None
    return process.engine


@pytest.mark.parametrize(("name", "point", "rank"), SAMPLE)
def test_a_rank_is_lost_and_comes_back(name: str, point: str, rank: int) -> None:
    cluster = loses(name, f"kill:rank={rank},step=2,point={point}")
    assert all(not engine_of(process).view.assignment.rehomed for process in cluster.finished)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "point", "rank"), [case for case in CASES if case not in SAMPLE])
def test_a_rank_is_lost_at_any_other_point(name: str, point: str, rank: int) -> None:
    loses(name, f"kill:rank={rank},step=2,point={point}")


@pytest.mark.parametrize(
    ("name", "ranks"), [("two cells of one rank", (3, 1)), ("two cells", (3,)), ("two cells, each expert cut", (2,))]
)
def test_experts_of_ranks_that_stay_away_have_homes_with_the_rest_of_their_crew(
    name: str, ranks: tuple[int, ...]
) -> None:
    points = ("mid_backward", "after_vote")
    kills = [f"kill:rank={rank},step={2 + 2 * at},point={points[at]}" for at, rank in enumerate(ranks)]
    for process in loses(name, "back=never", *kills).finished:
        homes = dict(engine_of(process).view.assignment.rehomed)
        assert sorted(map(len, homes.values())) == sorted([0, EXPERTS] * len(ranks)), (
            "of each damaged crew one cell has all"
        )


def test_a_spare_has_the_experts_of_the_rank_that_it_replaces() -> None:
    cluster = loses("two cells of one rank", "spares=1", "back=never", "kill:rank=1,step=2,point=mid_backward")
    for process in cluster.finished:
        place = engine_of(process).view.assignment.place(4)
        assert place is not None and place.crew is not None
        assert place.crew.ranks == (0, 4) and place.crew.experts_of(4) == (2, 3)


RESHAPES = {
    "one crew in each of two stages": ("two cells of one rank", "1|2|2"),
    "one stage of two crews": ("two cells of one rank, in two stages", "1|1|4"),
    "a crew of all ranks": ("two cells of one rank", "1|1|4|1|4"),
    "every rank has all experts": ("two cells of one rank, in two stages", "1|2|2|1|1"),
    "crews of half the size in two stages": ("two cells", "1|2|1|2|2"),
    "a crew in each cell": ("two cells, each expert cut", "1|1|2|2|1"),
}
"""New crews → crews at the launch, and sizes."""
ALWAYS = ("a crew of all ranks", "crews of half the size in two stages")


@pytest.mark.parametrize(
    ("name", "to"),
    [pytest.param(*case, id=new, marks=() if new in ALWAYS else pytest.mark.slow) for new, case in RESHAPES.items()],
)
def test_crews_are_formed_anew_for_other_sizes(name: str, to: str) -> None:
    """Losses are those of the launch's crews, and each crew has all experts."""
    cluster = loses(name, f"reshape:to={to},step=1", "steps=9")
    sizes = ParallelSizes(*map(int, to.split("|")))
    for process in cluster.finished:
        present = engine_of(process).view.assignment
        assert present.base.sizes[:4] == sizes[:4] and not present.rehomed
        if len(to.split("|")) == 5:
            assert present.base.sizes == sizes
        place = present.place(process.rank)
        assert place is not None and place.crew is not None
        assert sorted({expert for mine in place.crew.experts for expert in mine}) == list(range(EXPERTS))


@pytest.mark.parametrize("point", ["in_migration_finish", pytest.param("mid_backward", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", [1, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 2, 3))])
def test_a_rank_is_lost_while_crews_are_formed_anew(point: str, rank: int) -> None:
    where = "" if point.startswith("in_") else ",step=4"
    lost = f"kill:rank={rank},point={point}{where}"
    cluster = loses("two cells of one rank", f"reshape:to=1|2|2,step=1 {lost}", "steps=14")
    sizes = ParallelSizes(1, 2, 2, 1, 2)
    assert {engine_of(process).view.assignment.base.sizes for process in cluster.finished} == {sizes}


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("1|2|2|1|4", "EP 4 takes a number of replicas that is a multiple of 4"),
        pytest.param("1|1|4|1|3", "EP 3 does not divide 4 experts", marks=pytest.mark.slow),
    ],
)
def test_crews_that_cannot_be_are_refused_in_one_line(to: str, why: str) -> None:
    cluster = loses("two cells of one rank", f"reshape:to={to},step=1")
    (line,) = [line for line in cluster.finished[0].notices if "refused" in line]
    assert line.endswith(why)


def test_losses_do_not_depend_on_the_sizes_of_groups() -> None:
    found = [loses(name) for name in ("a cell", "two cells", "two cells, each expert cut")]
    for step, result in found[0].finished[0].results.items():
        for other in found[1:]:
            assert other.finished[0].results[step].losses["loss"] == pytest.approx(result.losses["loss"], rel=1e-6)
