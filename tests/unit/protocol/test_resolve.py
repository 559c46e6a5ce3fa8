"""The decision of survivors on their reports: one case a rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.elastic.state.protocol import Holdings, all_copies, resolve
from megatron.elastic.state.record import GradientKey, StepRecord

A, B = (0, 0, 0), (0, 0, 1)
NEEDED = {A: (0, 1), B: (1, 0)}
ROWS = 8
ALL = ((0, 8),)


def record(version: int, generation: int = 1, skipped: bool = False) -> StepRecord:
    return StepRecord(version, skipped=skipped, gradient=GradientKey(version - 1, generation) if version else None)


def held(rank, oldest, newest=None, gradients=(), records=None, rows=(), torn=()) -> tuple[int, Holdings]:
    """A rank and its report."""
    newest = oldest if newest is None else newest
    records = (record(newest),) if records is None else records
    keys = tuple(GradientKey(*key) for key in gradients)
    statistics = tuple((key, rows) for key in keys)
    return rank, Holdings(oldest, newest, keys, records, statistics, torn)


def decide(*reports: tuple[int, Holdings], needed=NEEDED, rows=ROWS, again=NEEDED):
    return resolve(dict(reports), needed, lambda _: rows, again)


def test_between_steps_the_step_is_run_again_from_there():
    result = decide(held(1, 4))
    assert (result.kind, result.version, result.record) == ("rerun", 4, record(4))


def test_rule_one_a_copy_behind_with_the_gradient_counts_as_stepped_and_is_rolled_forward():
    result = decide(held(1, 4, gradients=[(4, 1)], records=(record(4), record(5))))
    assert (result.kind, result.version, result.gradient_key) == ("roll_forward", 5, GradientKey(4, 1))


def test_an_update_under_way_is_finished():
    result = decide(held(0, 4, 5, gradients=[(4, 1)], records=(record(4), record(5))), held(1, 5))
    assert (result.kind, result.version) == ("roll_forward", 5)


def test_the_record_of_one_survivor_serves_all():
    result = decide(held(0, 5), held(1, 4, gradients=[(4, 1)], records=(record(4),)))
    assert (result.kind, result.version, result.record) == ("roll_forward", 5, record(5))


def test_a_survivor_at_the_version_but_without_its_record_is_given_it():
    result = decide(held(0, 5), held(1, 5, records=()))
    assert (result.kind, result.version) == ("roll_forward", 5)


def test_rule_eight_without_the_record_the_vote_is_taken_again_over_complete_gradients():
    result = decide(held(0, 4, gradients=[(4, 1)], rows=ALL), held(1, 4, gradients=[(4, 1)]))
    assert (result.kind, result.version, result.record) == ("revote", 5, record(4))
    assert result.gradient_key == GradientKey(4, 1)


def test_a_vote_is_taken_again_only_by_the_copies_it_was_to_name():
    """Rank 0 gives B up, rank 1 has died with the copy it was to go to: of B only the version before is left."""
    first, second = (held(rank, 4, gradients=[(4, 1)], rows=ALL) for rank in (0, 2))
    needed = {A: (0, 2), B: (0, 1)}
    assert decide(first, second, needed=needed, again={A: (0, 2), B: (2, 1)}).kind == "revote"
    for again in ({A: (0, 2), B: (1,)}, None):
        result = decide(first, second, needed=needed, again=again)
        assert (result.kind, result.version) == ("rerun", 4)


@pytest.mark.parametrize(
    ("why", "first", "second"),
    [
        ("a survivor lacks the gradient", [(4, 1)], []),
        ("gradients are of different generations", [(4, 1)], [(4, 2)]),
        ("gradients are of different attempts", [(4, 1, 0)], [(4, 1, 1)]),
    ],
)
def test_incomplete_gradients_mean_running_the_step_again(why, first, second):
    result = decide(held(0, 4, gradients=first, rows=ALL), held(1, 4, gradients=second, rows=ALL))
    assert (result.kind, result.version) == ("rerun", 4), why


def test_statistics_of_some_samples_missing_mean_running_the_step_again():
    gradients = [(4, 1)]
    part = decide(held(0, 4, gradients=gradients, rows=((0, 3),)), held(1, 4, gradients=gradients, rows=((4, 8),)))
    whole = decide(held(0, 4, gradients=gradients, rows=((0, 4),)), held(1, 4, gradients=gradients, rows=((3, 8),)))
    assert (part.kind, whole.kind) == ("rerun", "revote")


def test_statistics_of_one_computation_do_not_complete_those_of_another():
    old, new = GradientKey(4, 1), GradientKey(4, 3)
    first, second = (((old, ((0, 4),)), (new, ((0, 4),))), ((old, ((4, 8),)), (new, ())))
    reports = [
        (rank, replace(held(rank, 4, gradients=[old, new])[1], statistics=statistics))
        for rank, statistics in enumerate((first, second))
    ]
    result = decide(*reports)
    assert (result.kind, result.gradient_key) == ("revote", old), "the new one lacks rows 4 to 8"


def test_no_vote_of_an_earlier_step_is_taken_again():
    """The gradients of step 3, whose record is known, are complete; those of step 4 are not there."""
    result = decide(held(0, 4, gradients=[(3, 1)], rows=ALL), held(1, 4, gradients=[(3, 1)], rows=ALL))
    assert (result.kind, result.version) == ("rerun", 4)


def test_the_batch_is_that_of_the_step_after_the_version_it_goes_on_from():
    """Four rows are all samples of a step early in a ramp-up, and half of those of a later step."""
    reports = [held(rank, 4, gradients=[(4, 1)], rows=((0, 4),)) for rank in (0, 1)]
    for consumed, kind in ((0, "revote"), (100, "rerun")):
        known = (replace(record(4), consumed_samples=consumed),)
        by_rank = {rank: replace(report, records=known) for rank, report in reports}
        found = resolve(by_rank, NEEDED, lambda record: 4 if record.consumed_samples < 100 else 8, NEEDED)
        assert found.kind == kind


def test_of_two_complete_keys_the_newest_generation_is_voted_on():
    both = [(4, 1), (4, 3)]
    result = decide(held(0, 4, gradients=both, rows=ALL), held(1, 4, gradients=both, rows=ALL))
    assert result.gradient_key == GradientKey(4, 3)


def test_a_skipped_step_is_rolled_forward_without_gradients():
    result = decide(held(0, 4, records=(record(4), record(5, skipped=True))), held(1, 4))
    assert (result.kind, result.version, result.record.skipped) == ("roll_forward", 5, True)


def test_an_overflow_reported_by_two_survivors_is_one_record():
    overflow = replace(record(5, skipped=True), grad_norm=float("nan"))
    reports = [held(rank, 4, records=(record(4), replace(overflow))) for rank in (0, 1)]
    result = decide(*((rank, Holdings.from_json(report.to_json())) for rank, report in reports))
    assert (result.kind, result.version) == ("roll_forward", 5)


def test_rule_seven_a_block_without_copies_is_named():
    result = decide(held(0, 4), needed={A: (0, 1), B: (1, 2)})
    assert (result.kind, result.missing) == ("lost", (B,))


def test_rule_sixteen_copies_of_an_earlier_life_do_not_count_until_the_rank_has_voted():
    """The record names A on rank 1, which is lost, and on rank 2, which was let in since and has B alone."""
    named, reports = {A: (1, 2), B: (2, 0)}, dict(held(rank, 4) for rank in (0, 2))
    with_rule, without = (
        resolve(reports, all_copies(named, reports, void), lambda _: ROWS, None) for void in ({2}, ())
    )
    assert (with_rule.kind, with_rule.missing) == ("lost", (A,))
    assert without.kind == "rerun", "the job would go on without A"


def test_mixed_versions_are_never_taken_for_a_state():
    """Rank 0 has stepped its block, rank 1 can not: no common version."""
    result = decide(held(0, 5), held(1, 4), needed={A: (0,), B: (1,)})
    assert (result.kind, result.missing) == ("lost", (B,))


def test_an_older_complete_version_is_better_than_none_and_the_odd_rank_is_named():
    result = decide(held(0, 5, records=(record(5),)), held(1, 4), needed={A: (0, 1), B: (1,)})
    assert (result.kind, result.version, result.stale) == ("rerun", 4, (0,))


def test_a_torn_block_is_no_copy():
    needed = {A: (0, 1), B: (1, 0)}
    torn = held(0, 4, 5, gradients=[(4, 1)], records=(record(5),), torn=(A,))
    assert decide(torn, needed=needed).missing == (A,)
    assert decide(torn, held(1, 5), needed=needed).kind == "roll_forward"


def test_joiners_and_spares_without_copies_do_not_hold_up_anything():
    joiner = 7, Holdings()
    assert decide(held(0, 4), joiner).kind == "rerun"
    assert decide(joiner).missing == (A, B)


def test_a_vote_is_taken_again_only_with_every_rank_that_was_ready_for_it():
    ready, key = held(0, 4, gradients=[(4, 1)], rows=ALL), GradientKey(4, 1)
    parked = 7, Holdings(gradients=(key,), statistics=((key, ()),))
    assert decide(ready, parked).kind == "revote"
    assert decide(ready, (7, Holdings())).kind == "rerun", "without copies, and not yet at the vote"
    behind = 1, Holdings(4, 4, (key,), (record(4),))
    assert decide(ready, behind).kind == "rerun", "it has the gradients, and has not come to the vote"


def test_of_two_records_of_one_version_the_one_after_an_undone_step_holds():
    """``state`` mode: rank 0 is back at version 4 under the placement of the undone step, rank 1 has yet to go back."""
    before, undone = replace(record(4), placement="old"), replace(record(5), placement="new")
    after = before.in_place_of("new")
    for reports in ([after], [before, undone]), ([before, undone], [after]):
        result = decide(*(held(rank, 4, records=tuple(records)) for rank, records in enumerate(reports)))
        assert (result.kind, result.record) == ("rerun", after)
    assert after.in_place_of("new") is after and after.age > before.age


def test_two_different_records_of_one_version_are_an_error():
    with pytest.raises(ValueError, match="two different records of version 5"):
        decide(held(0, 5, records=(record(5, 1),)), held(1, 5, records=(record(5, 2),)))


def test_the_first_step_of_all():
    start = (StepRecord(0),)
    assert decide(held(0, 0, records=start), held(1, 0, records=start)).kind == "rerun"


def test_state_mode_goes_back_one_version_when_the_stepped_blocks_did_not_arrive():
    """Owner 1 has stepped B; A's owner died before shipping the stepped A to its mirror 1."""
    ahead = 1, Holdings(4, 5, records=(record(4), record(5)), floor=4)
    result = decide(ahead, needed={A: (0, 1), B: (1, 0)})
    assert (result.kind, result.version, result.record) == ("rerun", 4, record(4))
    arrived = 1, Holdings(5, 5, records=(record(4), record(5)), floor=4)
    assert decide(arrived).version == 5
