"""Recoveries as one line each, in the field's words."""

from __future__ import annotations

from megatron.elastic.observe.event_kinds import ProtectionEvent, RankLostEvent, RecoveryEvent
from megatron.elastic.observe.summary import lost_text, protection_line, ranks_text, recovery_line


def lost(rank, group=(), stage=1, replica=0, lines=()):
    return RankLostEvent(rank, 0, "node-b", "signal SIGKILL", 57, lines, group, stage, replica)


def test_a_lost_tensor_parallel_group_is_named_with_its_place_and_who_is_parked():
    text = lost_text([lost(5, (4, 5))], parked=(4, 9))
    assert text == "tensor-parallel group {4,5} (stage 1, replica 0; rank 4 parked)"


def test_a_group_that_goes_on_with_fewer_ranks_is_named_by_the_lost_ones():
    text = lost_text([lost(5, (4, 5, 6, 7))], parked=(7,), going_on=(4, 6))
    assert text == ("rank 5 of tensor-parallel group {4-7} (stage 1, replica 0; rank 7 parked; ranks {4,6} go on)")


def test_both_ranks_of_a_group_are_one_and_other_groups_follow():
    text = lost_text([lost(9, (8, 9), replica=1), lost(5, (4, 5)), lost(4, (4, 5))])
    assert text == (
        "tensor-parallel group {4,5} (stage 1, replica 0), tensor-parallel group {8,9} (stage 1, replica 1)"
    )


def test_without_tensor_parallelism_the_rank_itself_is_named_and_a_spare_belongs_to_no_pipeline():
    assert lost_text([lost(3, (3,))]) == "rank 3 (stage 1, replica 0)"
    assert lost_text([lost(3, stage=None, replica=None)]) == "rank 3 (no part of a pipeline)"


def test_a_recovery_names_what_is_missing_and_leaves_the_loss_itself_to_the_launcher():
    line = recovery_line(RecoveryEvent(57, "re-run", {}), 3, [lost(3, (3,), lines=("RuntimeError: boom",))])
    assert line == (
        "recovered at generation 3 without rank 3 (stage 1, replica 0): step 57 re-run, 0 steps lost, 0.000 s"
    )


def test_rank_sets_are_short():
    assert ranks_text([5, 4]) == "{4,5}"
    assert ranks_text([*range(64), 70]) == "{0-63,70}"
    assert ranks_text([1, 3]) == "{1,3}" and ranks_text([]) == "{}"


def test_a_recovery_says_what_became_of_the_step_and_where_time_went():
    line = recovery_line(RecoveryEvent(57, "rolled forward", {"freeze": 0.021, "edit": 0.09}), generation=3)
    assert line == (
        "recovered at generation 3: step 57 rolled forward, 0 steps lost, 0.111 s (freeze 0.021, edit 0.090)"
    )
    assert "1 step lost" in recovery_line(RecoveryEvent(57, "checkpoint", {}, lost_steps=1), 4)


def test_a_line_says_for_how_long_blocks_were_short_of_a_mirror():
    line = protection_line(ProtectionEvent(58, 0.4123, 1, 12))
    assert line == "mirrors complete with step 58: 12 state blocks were short of one for 0.412 s (1 step)"
    assert "1 state block was short" in protection_line(ProtectionEvent(58, 0.4, 2, 1))
