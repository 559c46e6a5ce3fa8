"""Facts of copies before the history checker: each rule is broken by the facts that show it, and by nothing less."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tools.history.copies import check_copies
from tools.history.lines import Life, Line
from tools.history.verdict import Verdict

KEY = [1, 1, 0]
"""Gradients of step 2, computed in generation 1."""


class Logs:
    """Lines of ranks, in the order said."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def say(self, rank: int, kind: str, generation: int = 1, **fields: Any) -> None:
        now = len(self.lines) + 1
        self.lines.append(Line(f"rank{rank}", now, kind, Life(rank, 0), generation, now, fields))

    def record(self, rank: int, source: str, step: int, generation: int = 1, **more: Any) -> None:
        said: dict[str, Any] = {"digest": f"record{step}", "samples": None, "gradient": None, "skipped": False}
        self.say(
            rank, "record", generation, **{**said, "members": [], "placement": "p", **more}, step=step, source=source
        )

    def vote(self, rank: int, step: int, generation: int = 1, **more: Any) -> None:
        said = {"samples": [8 * step - 8, 8 * step], "gradient": [step - 1, generation, 0], "homes": [[0, 1], [1, 2]]}
        self.record(rank, "vote", step, generation, **{**said, "oldest": step - 1, "retained": 1, **more})

    def report(self, rank: int, **more: Any) -> None:
        said = {"step": 1, "oldest": 1, "newest": 1, "gradients": [KEY], "rows": [[*KEY, 0, 8]], "voting": "p"}
        self.say(rank, "report", **{**said, "torn": 0, "admitted": False, **more})

    def found(self) -> list[str]:
        """The rules that are broken."""
        verdict, lives = Verdict(), defaultdict[Life, list[Line]](list)
        for line in self.lines:
            lives[line.life].append(line)
        check_copies(self.lines, lives, verdict)
        return [one.rule for one in verdict.violations]


@pytest.mark.parametrize(
    ("facts", "rules"),
    [
        ({}, []),
        ({"oldest": 0}, ["updated in time"]),
        ({"oldest": -1}, []),
        ({"retained": 3}, ["updated in time"]),
        ({"retained": 2}, []),
    ],
    ids=str,
)
def test_a_rank_votes_when_its_copies_are_updated(facts: dict[str, Any], rules: list[str]) -> None:
    logs = Logs()
    logs.vote(0, 2, **facts)
    assert logs.found() == rules


def test_copies_are_updated_by_the_gradients_of_the_rank_s_own_records() -> None:
    logs = Logs()
    logs.vote(0, 2, generation=3)
    logs.say(0, "phases", 3, step=2, applied=[[2, 1, 3, 0], [1, 0, 1, 0]])
    assert not logs.found(), "it holds no record of version 1 that says otherwise"
    logs.say(0, "phases", 3, step=2, applied=[[2, *KEY]])
    assert logs.found() == ["one gradient"]


@pytest.mark.parametrize(
    ("facts", "broken"),
    [
        ({}, True),
        ({"coming": False}, False),
        ({"coming": None, "short": 0}, False),
        ({"short": 0}, False),
        ({"gradient": [1, 0, 0]}, False),
    ],
    ids=str,
)
def test_missing_copies_are_named_when_all_say_that_they_come(facts: dict[str, Any], broken: bool) -> None:
    logs = Logs()
    for rank in (0, 1):
        logs.record(rank, "start", 0, members=[0, 1])
    logs.vote(0, 2, coming=True, short=4)
    assert not logs.found(), "rank 1 may have said no"
    logs.vote(1, 2, **{"coming": True, "short": 4, **facts})
    equal = {name: fact for name, fact in facts.items() if name != "coming"}  # by the same record and configuration
    logs.lines[-2].fields.update(equal)
    assert logs.found() == ["copies named in time"] * broken


def after_a_lost_vote(**more: Any) -> Logs:
    """Rank 0 alone knew the vote on step 2; ranks 1 and 2, which hold all it needs, run the step again."""
    logs = Logs()
    logs.vote(0, 2, gradient=KEY)
    for rank in (1, 2):
        logs.report(rank)
    for rank in (1, 2):
        taken = {"members": [1, 2], "gradient": [0, 1, 0], "resolution": "rerun", "again": None}
        logs.record(rank, "decision", 1, 2, **{**taken, **more})
    return logs


def test_a_vote_that_only_a_lost_rank_knew_is_taken_again() -> None:
    assert after_a_lost_vote().found() == ["vote taken again"]
    assert not after_a_lost_vote(resolution="revote", again=KEY).found()
    assert after_a_lost_vote(resolution="revote", again=[1, 1, 1]).found() == ["vote taken again"]


@pytest.mark.parametrize(
    "facts",
    [
        {"gradients": []},
        {"rows": [[*KEY, 0, 4]]},
        {"step": 2},
        {"voting": "q"},
        {"torn": 1},
        {"admitted": True},
        {"oldest": 0},
        {"oldest": -1, "newest": -1},
    ],
    ids=str,
)
def test_unless_a_survivor_lacks_something_for_it(facts: dict[str, Any]) -> None:
    logs = after_a_lost_vote()
    report = next(line for line in logs.lines if line.kind == "report" and line.life.rank == 1)
    report.fields.update(facts)
    if "rows" in facts:
        next(line for line in logs.lines if line.kind == "report" and line.life.rank == 2).fields.update(facts)
    assert not logs.found()


def test_nor_with_a_newcomer_among_the_members() -> None:
    assert not after_a_lost_vote(members=[1, 2, 3]).found()


@pytest.mark.parametrize(
    ("copy", "report", "broken"),
    [
        ((2, []), {}, True),
        ((1, [KEY]), {}, True),
        ((1, []), {}, False),
        ((2, []), {"gradients": [[2, 1, 0]]}, False),
        ((2, [[2, 1, 0]]), {"gradients": [[2, 1, 0]]}, True),
        ((2, []), {"admitted": True}, False),
    ],
    ids=str,
)
def test_state_is_lost_only_if_no_survivor_has_a_copy_that_can_go_on(
    copy: tuple[int, list[list[int]]], report: dict[str, Any], broken: bool
) -> None:
    logs = Logs()
    logs.vote(0, 2, gradient=KEY)
    logs.report(0, **{"gradients": [], **report})
    logs.say(0, "lost_state", step=2, blocks=2, held=[[0, 0, 1, *copy]])
    logs.vote(0, 2, generation=5, gradient=[1, 5, 0])  # the job has begun anew
    assert logs.found() == ["every copy counts"] * broken


@pytest.mark.parametrize(
    ("facts", "broken"),
    [({}, False), ({"ranks": 2}, True), ({"placement": "q"}, True), ({"placement": "later"}, True)],
    ids=str,
)
def test_a_promise_counts_copies_that_a_vote_has_named(facts: dict[str, Any], broken: bool) -> None:
    logs = Logs()
    logs.vote(0, 2)
    logs.vote(0, 3, generation=2, placement="later")
    logs.say(0, "tolerance", 1, **{"step": 2, "ranks": 1, "placement": "p", "homes": [[0, 1], [1, 2, 3]], **facts})
    assert logs.found() == ["promise"] * broken


@pytest.mark.parametrize(("homes", "broken"), [([[0], [1, 2]], False), ([[0, 2], [1, 2]], True)], ids=str)
def test_copies_that_were_dropped_for_changed_memory_behind_a_vote_are_no_unnamed_ones(
    homes: list[list[int]], broken: bool
) -> None:
    logs = Logs()
    logs.vote(0, 2, homes=[[0, 1], [1, 2, 3]])
    logs.say(0, "tolerance", 1, step=2, ranks=0, placement="q", homes=homes)
    assert logs.found() == ["promise"] * broken


def test_a_log_without_facts_breaks_no_rule_of_copies() -> None:
    logs = Logs()
    logs.record(0, "start", 0, members=[0])
    logs.record(0, "vote", 1, samples=[0, 8], gradient=[0, 1, 0])
    logs.say(0, "phases", step=1)
    logs.say(0, "tolerance", step=1, ranks=5)
    assert not logs.found()
