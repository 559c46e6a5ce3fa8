"""Experts move to other ranks of their crew until all have about the same load, and losses on the way lose nothing.

One expert of the model receives half of the positions (:mod:`routed_model`). Losses are those of a run in which no
expert moves.
"""

from __future__ import annotations

import pytest

from megatron.elastic.control.observations import ExpertLoads
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.transaction.even_homes import EvenHomes
from megatron.elastic.runtime.publish import loads_of
from megatron.elastic.state.expert_load import SPAN
from tests.cluster.checks import check
from tests.cluster.cluster import Cluster, Program, run

LAYOUTS = {"dp4": ("dp4", (2, 1)), "pp2dp2": ("pp2dp2", (2, 1)), "cells of two": ("tp2dp2", (2, 2))}
"""Name → layout, whose tensor size is the number of parts of a sequence, and (sets of experts, ranks with a part)."""
ON_THE_WAY = ("in_migration_begin", "in_migration_finish", "in_migration_switch")
SKEWED, EVEN = 1.5, 1.25
"""Load of the busiest rank relative to the mean, with the homes of the launch and with the best ones: in each layer one
expert has half of the positions, and homes are the same in all layers."""


def trained(name: str, *words: str) -> list[Engine]:
    """The engines after a run in which no committed step was lost, with the losses of one in which no expert moves."""
    layout, experts = LAYOUTS[name]
    fixed = f"evaluate={SPAN} micro_batches=4 mirrors=2 expert_balance=homes"
    cluster: Cluster = run(" ".join([layout, fixed, *words]), Program(parts=True, experts=experts))
    check(cluster)
    assert all(outcome.lost_steps == 0 for process in cluster.processes for outcome in process.recoveries)
    return [process.engine for process in cluster.finished if process.engine is not None]


def shown(engine: Engine) -> ExpertLoads:
    """The load as users see it."""
    load = engine.tools.settings.hyper.load
    assert load is not None
    return loads_of(engine.record, engine.view, load)


def imbalance(engine: Engine) -> float:
    return shown(engine).imbalance


@pytest.mark.parametrize(
    "name", [name if name == "dp4" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_experts_move_until_their_load_is_even(name: str) -> None:
    engines = trained(name, f"steps={2 * SPAN}")
    assert len(engines) == 4
    for engine in engines:
        homes = dict(engine.view.assignment.rehomed)
        assert homes and all(len(experts) == 2 for experts in homes.values()), "two experts of four on each cell"
        assert imbalance(engine) == EVEN
        assert {one.ratio for one in shown(engine).busiest} == {2.0}, "half of the positions, of four experts"


@pytest.mark.slow
def test_in_the_last_steps_no_expert_moves() -> None:
    for engine in trained("dp4", f"steps={2 * SPAN - 1}"):
        assert not engine.view.assignment.rehomed and imbalance(engine) == SKEWED
        assert EvenHomes(engine.context).target() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "rank"),
    [
        pytest.param(point, rank, marks=() if (point, rank) == ("in_migration_finish", 1) else pytest.mark.slow)
        for point in ON_THE_WAY
        for rank in range(4)
    ],
)
def test_a_rank_that_is_lost_on_the_way_comes_back_and_experts_move_again(point: str, rank: int) -> None:
    for engine in trained("dp4", f"steps={4 * SPAN}", f"kill:rank={rank},point={point}"):
        assert len(engine.view.living) == 4 and imbalance(engine) == EVEN


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("point", ["mid_backward", "after_reduce", "after_vote", "mid_update"])
def test_a_rank_is_lost_while_homes_follow_the_load(name: str, point: str) -> None:
    for engine in trained(name, f"steps={5 * SPAN}", f"kill:rank=1,step={2 * SPAN},point={point}"):
        assert len(engine.view.living) == 4 and imbalance(engine) == EVEN


@pytest.mark.slow
def test_survivors_share_the_load_of_a_rank_that_stays_away() -> None:
    for engine in trained("dp4", f"steps={4 * SPAN}", "back=never", f"kill:rank=1,step={SPAN + 8},point=mid_backward"):
        homes = dict(engine.view.assignment.rehomed)
        assert sorted(homes[0]) == [0, 1, 2, 3] and homes[1] == ()
        assert all(len(homes[cell]) == 2 for cell in (2, 3)), "the other crew has its own homes"


@pytest.mark.slow
def test_a_spare_takes_the_homes_of_the_rank_that_it_replaces() -> None:
    kill = f"kill:rank=1,step={SPAN + 8},point=mid_backward"
    for engine in trained("dp4", f"steps={4 * SPAN}", "spares=1", "back=never", kill):
        place = engine.view.assignment.place(4)
        assert place is not None and place.crew is not None and place.crew.ranks == (0, 4)
        assert imbalance(engine) == EVEN
