"""One rank at a boundary: what it does about the open request, and what it tells once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.elastic.control.requests import OpenReshape, ParallelSizes, Pending
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.transaction.reshape import Reshaping, open_requests
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Grid

LAUNCH = LaunchTopology(2, 2, 1, tuple(pairwise((0, 2, 4))), Grid(8, 1, 1))
ASKED = (3, 1, 4, 1)
"""Request 3: TP 1, PP 4, DP 1."""


class Rank:
    """A rank at boundaries; ``told`` and ``noticed`` are what it said."""

    def __init__(self, living: tuple[int, ...] = (0, 1, 2, 3), lowest: bool = True, hopeless: bool = False) -> None:
        self.told: list[tuple[int, str, str]] = []
        self.noticed: list[str] = []
        self.moving: list[int] = []
        self.refusal = ""
        pending = Pending(reshape=OpenReshape(*ASKED, hopeless=hopeless))
        membership = SimpleNamespace(
            pending=lambda: pending, reshape_is=lambda number, state, text: self.told.append((number, state, text))
        )
        self.at = SimpleNamespace(
            record=SimpleNamespace(version=7, tokens=64.0, skipped=False),
            view=SimpleNamespace(assignment=Assignment.at_launch(LAUNCH), living=living, lowest=lowest, generation=1),
            views=SimpleNamespace(reshaped=self._reshaped),
            agreement=SimpleNamespace(membership=membership),
            listener=SimpleNamespace(noticed=self.noticed.append, reshapes=self.moving.append),
        )
        self.reshaping = Reshaping(cast(Any, self.at))

    def _reshaped(self, living: tuple[int, ...], sizes: ParallelSizes) -> Assignment:
        if self.refusal:
            raise PlanError(self.refusal)
        return replace(Assignment.at_launch(LAUNCH), formed=((1, ()),))


def test_without_a_request_nothing_is_done() -> None:
    rank = Rank()
    assert rank.reshaping.target(()) is None and not rank.told and not rank.noticed


def test_sizes_in_force_are_told_once_a_generation_by_one_rank() -> None:
    for lowest in (True, False):
        rank = Rank(lowest=lowest)
        for generation in (1, 1, 2):
            rank.at.view.generation = generation
            assert rank.reshaping.target((3, 2, 2, 1)) is None
        assert rank.told == [(3, "in force", "TP 2, PP 2, DP 1 since step 7")] * (2 if lowest else 0)


def test_the_same_sizes_with_a_lost_cell_are_formed_anew() -> None:
    rank = Rank(living=(0, 1, 2, 3))
    rank.at.view.assignment = replace(Assignment.at_launch(LAUNCH), formed=((1, ()),))
    assert rank.reshaping.target((3, 2, 2, 1)) is not None


@pytest.mark.parametrize("hopeless", [False, True])
def test_too_few_ranks_are_waited_for_while_there_is_hope(hopeless: bool) -> None:
    rank = Rank(living=(0, 1, 3), hopeless=hopeless)
    assert rank.reshaping.target(ASKED) is None and rank.reshaping.target(ASKED) is None
    missing = "TP 1, PP 4, DP 1 takes 4 ranks, and 3 are members"
    if hopeless:
        why = f"{missing}; no more are expected"
        assert rank.told == [(3, "refused", why)] and rank.noticed == [f"reshape refused: {why}"]
    else:
        assert not rank.told and rank.noticed == [f"reshape: {missing}: waiting for ranks"]


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    rank = Rank()
    rank.refusal = "4 replicas for 2 micro-batches a step"
    assert rank.reshaping.target(ASKED) is None
    assert rank.told == [(3, "refused", "TP 1, PP 4, DP 1: 4 replicas for 2 micro-batches a step")]


def test_a_mean_loss_is_no_sum_over_parts_of_the_sequence() -> None:
    rank = Rank()
    rank.at.record.tokens = 0.0
    assert rank.reshaping.target((3, 2, 1, 1, 2)) is None
    why = "ranks that share the sequence need a loss function that returns (sum, tokens, report), not a mean"
    assert rank.told == [(3, "refused", f"TP 2, CP 2, PP 1, DP 1: {why}")]


def test_a_step_that_is_left_out_tells_nothing_about_the_loss() -> None:
    rank = Rank()
    rank.at.record.tokens, rank.at.record.skipped = 0.0, True
    assert rank.reshaping.target((3, 2, 1, 1, 2)) is None and not rank.told


def test_a_rank_does_not_vote_for_sizes_that_its_program_cannot_compute() -> None:
    rank = Rank()
    at = cast(Any, rank.at)
    at.tools = SimpleNamespace(interface=SimpleNamespace(objection=lambda parts: ""))
    assert open_requests(at).reshape is not None and not rank.told
    at.tools.interface.objection = lambda parts: "the script has whole sequences"
    assert open_requests(at) == Pending()
    assert rank.told == [(3, "refused", "TP 1, PP 4, DP 1: the script has whole sequences")]


def test_the_begin_is_told() -> None:
    rank = Rank()
    target = rank.reshaping.target(ASKED)
    assert target is not None
    rank.reshaping.begun(ASKED, target)
    assert rank.moving == [0], "the cells keep their units here"
    line = "TP 1, PP 4, DP 1: state moves beside steps since step 7"
    assert rank.told == [(3, "under way", line)] and rank.noticed == [f"reshape to {line}"]
