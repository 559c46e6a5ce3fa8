"""Several ranks of a crew compute a hot expert, each some of its positions; losses on the way lose nothing.

One expert of the model receives half of the positions (:mod:`routed_model`): with four ranks that have an expert each,
twice as many as a mean rank. Losses are those of a run without replicas.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.inject import STEP_POINTS
from megatron.elastic.state.expert_load import SPAN
from tests.cluster.checks import check
from tests.cluster.cluster import Cluster, Program, run
from tests.cluster.routed_model import EXPERTS
from tests.cluster.test_even_homes import ON_THE_WAY, imbalance

HOT = 1
"""The expert with half of the positions of each layer."""
LAYOUTS = {
    "four ranks": ("dp4", (4, 1)),
    "two crews": ("dp4", (2, 1)),
    "two stages": ("pp2dp2", (2, 1)),
    "cells of two, each expert cut": ("tp2dp2", (2, 2)),
    "cells of two sets": ("tp2dp2", (4, 1)),
}
"""Name → layout, whose tensor size is the number of parts of a sequence, and (sets of experts, ranks with a part)."""
MADE = 2 * SPAN
"""Replicas are made in the steps after the first review of the load, and in use from then on."""


def trained(name: str, *words: str, policy: str = "replicas", grid: bool = False) -> Cluster:
    """The cluster after a run in which no committed step was lost, with the losses of one without replicas."""
    layout, experts = LAYOUTS[name]
    fixed = f"evaluate={SPAN} micro_batches=4 mirrors=2 expert_balance={policy}"
    found = run(" ".join([layout, fixed, *words]), Program(parts=not grid, grid=grid, experts=experts))
    check(found)
    assert all(outcome.lost_steps == 0 for process in found.processes for outcome in process.recoveries)
    return found


def engines(found: Cluster) -> list[Engine]:
    return [process.engine for process in found.finished if process.engine is not None]


def replicas(engine: Engine) -> tuple[int, ...]:
    """The largest number of homes of each expert."""
    assignment = engine.view.assignment
    each = [assignment.expert_replicas(unit) for unit in range(assignment.launch_topology.compute_units)]
    return tuple(max(counts) for counts in zip(*each, strict=True))


@pytest.mark.parametrize(
    "name", [name if name == "four ranks" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_a_hot_expert_has_replicas_and_losses_do_not_change(name: str) -> None:
    for engine in engines(trained(name, f"steps={MADE}")):
        counts = replicas(engine)
        assert counts[HOT] >= 2 and len(counts) == EXPERTS
        if name == "four ranks":
            assert imbalance(engine) < 1.3, "2.0 without replicas, whatever the homes"


@pytest.mark.parametrize("more", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_lazarus_has_two_replicas_of_each_expert(more: int) -> None:
    """Four ranks with room for two experts have two replicas of each of four; then a loss moves no expert."""
    found = trained("four ranks", f"steps={MADE}", f"expert_replicas={more}", policy="lazarus")
    for engine in engines(found):
        assert min(replicas(engine)) >= 2
        before = engine.view.assignment
        after = before.crewed({0, 1, 2})
        for rank in (0, 1, 2):
            held, place = before.place(rank), after.place(rank)
            assert held is not None and held.crew is not None and place is not None and place.crew is not None
            assert set(held.crew.experts_of(rank)) <= set(place.crew.experts_of(rank))


@pytest.mark.parametrize(
    ("policy", "point", "rank"),
    [
        pytest.param(policy, point, rank, marks=pytest.mark.slow)
        for at, (policy, point, rank) in enumerate(
            (policy, point, rank) for policy in ("replicas", "lazarus") for point in STEP_POINTS for rank in range(4)
        )
    ],
)
def test_a_rank_is_lost_while_there_are_replicas_and_comes_back(policy: str, point: str, rank: int) -> None:
    words = f"steps={MADE + SPAN + 8}", f"kill:rank={rank},step={MADE},point={point}"
    for engine in engines(trained("four ranks", *words, policy=policy)):
        assert len(engine.view.living) == 4 and min(replicas(engine)) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "rank"),
    [
        pytest.param(point, rank, marks=() if (point, rank) == ("in_migration_switch", 1) else pytest.mark.slow)
        for point in ON_THE_WAY
        for rank in range(4)
    ],
)
def test_a_loss_while_replicas_are_made(point: str, rank: int) -> None:
    for engine in engines(trained("four ranks", f"steps={4 * SPAN}", f"kill:rank={rank},point={point}")):
        assert len(engine.view.living) == 4 and replicas(engine)[HOT] >= 2, "they are made again"


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("policy", ["replicas", "lazarus"])
def test_a_second_loss(name: str, policy: str) -> None:
    kills = f"kill:rank=0,step={MADE},point=mid_backward kill:rank=3,step={MADE + 2},point=after_vote"
    trained(name, f"steps={MADE + 8}", kills, policy=policy)


@pytest.mark.slow
def test_the_last_replica_is_lost() -> None:
    """All ranks but one stay away: it has every expert."""
    kills = [f"kill:rank={rank},step={MADE + 2 * at},point=mid_backward" for at, rank in enumerate((1, 3, 2))]
    found = trained("four ranks", f"steps={MADE + 8}", "back=never", *kills)
    (engine,) = engines(found)
    place = engine.view.assignment.place(0)
    assert place is not None and place.crew is not None and place.crew.experts == (tuple(range(EXPERTS)),)


@pytest.mark.slow
def test_a_spare_takes_the_replicas_of_the_rank_that_it_replaces() -> None:
    kill = f"kill:rank=1,step={MADE},point=mid_backward"
    for engine in engines(trained("four ranks", f"steps={MADE + 8}", "spares=1", "back=never", kill)):
        place = engine.view.assignment.place(4)
        assert place is not None and place.crew is not None and 4 in place.crew.ranks
        assert replicas(engine)[HOT] >= 2


@pytest.mark.slow
def test_a_rank_leaves_as_planned() -> None:
    found = trained("four ranks", f"steps={MADE + 12}", f"drain:rank=2,step={MADE}")
    for engine in engines(found):
        assert 2 not in engine.view.living


RESHAPES = {
    "two stages": ("1|2|2|1|2", 2),
    "two crews": ("1|1|4|1|2", 2),
    "cells of two sets": ("2|1|2|1|4", 2),
    "cells that have all experts": ("2|1|2|1|2", 1),  # experts move between cells, not within one
}
"""Name → sizes, and homes of the hot expert there."""


@pytest.mark.slow
@pytest.mark.parametrize("to", RESHAPES)
def test_a_reshape_ends_replicas_and_the_load_makes_new_ones(to: str) -> None:
    sizes, homes = RESHAPES[to]
    words = f"steps={MADE + 3 * SPAN}", f"reshape:to={sizes},step={MADE}"
    for engine in engines(trained("four ranks", *words, grid=True)):
        assert "|".join(map(str, engine.view.assignment.base.sizes)) == sizes
        assert replicas(engine)[HOT] == homes


@pytest.mark.slow
@pytest.mark.parametrize("point", [*ON_THE_WAY, "mid_backward"])
def test_a_loss_in_a_reshape_of_a_job_with_replicas(point: str) -> None:
    where = "" if point in ON_THE_WAY else f",step={MADE + 2}"
    words = f"kill:rank=1,point={point}{where} reshape:to=1|2|2|1|2,step={MADE}"
    for engine in engines(trained("four ranks", f"steps={MADE + 2 * SPAN}", words, grid=True)):
        assert engine.view.assignment.base.sizes == (1, 2, 2, 1, 2)


def scripts(least: int) -> st.SearchStrategy[str]:
    one = st.tuples(st.integers(0, 3), st.sampled_from(STEP_POINTS), st.integers(least, least + 4))
    return st.lists(one, min_size=1, max_size=3, unique_by=lambda kill: kill[0]).map(
        lambda found: " ".join(f"kill:rank={rank},point={point},step={step}" for rank, point, step in found)
    )


QUICK = settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)


@pytest.mark.slow
@QUICK
@given(scripts(MADE), st.integers(0, 1000), st.sampled_from(["replicas", "lazarus"]))
def test_any_losses_while_there_are_replicas(script: str, seed: int, policy: str) -> None:
    trained("four ranks", f"steps={MADE + 8} mirrors=3 seed={seed}", script, policy=policy)


@pytest.mark.slow
@settings(QUICK, max_examples=60)
@given(scripts(SPAN), st.integers(0, 1000), st.sampled_from(["replicas", "lazarus"]), st.sampled_from(sorted(LAYOUTS)))
def test_many_losses(script: str, seed: int, policy: str, name: str) -> None:
    trained(name, f"steps={MADE + 8} mirrors=3 seed={seed}", script, policy=policy)
