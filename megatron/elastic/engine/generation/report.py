"""The report of a rank for a frozen generation: versions, gradients, and its place in the host's loop.

The control plane carries the text without reading it. Every member reads every
report from the decision record and draws the same conclusion.

Phases: each step and each fenced action of the host's loop has a number, equal
on all ranks. ``done`` means that this rank finished the action's body and only waited
for the other ranks. If some rank is past the phase, or all ranks are done and the rank that logs
for all is among them, the phase is over on every rank; otherwise all repeat it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from megatron.elastic.control.membership import Decision
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.protocol import Holdings
from megatron.elastic.state.record import StepRecord

__all__ = ["NEWCOMER", "Report", "first_open", "joined_since_vote", "newcomers", "phase_is_over", "reports_of"]

NEWCOMER = ""
"""Report of a rank that has no state yet."""


@dataclass(frozen=True)
class Report:
    """One rank's report for a frozen generation."""

    holdings: Holdings
    phase: int
    done: bool
    parameters: int
    """Version of the parameters; lower than the state's if a gather was interrupted."""
    held_for: str
    """Digest of the assignment that decides which parameters this rank holds, and in what shapes."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """Phase → why a fenced action failed on some rank, as far as this rank knows."""
    under_way: bool = True
    """True if the phase is still open, as far as this rank knows."""
    voting: str = ""
    """Digest of the configuration that the vote under way is to name."""
    admitted: int = 0
    """Generation that admitted this rank, if it has not voted since (no vote has named its copies), else 0."""
    doubts: Mapping[BlockKey, int] = field(default_factory=dict)
    """Block → its owner when the contents of this rank's copy last differed from the owner's, if none was repaired."""
    reporter: int = -1
    """The rank that logs what this rank has ``done``."""

    @property
    def first_open(self) -> int:
        """The first open phase, as far as this rank knows."""
        return self.phase + (not self.under_way)

    def to_text(self) -> str:
        """Return one line of JSON."""
        return json.dumps(
            {
                "holdings": self.holdings.to_json(),
                "phase": self.phase,
                "done": self.done,
                "parameters": self.parameters,
                "held_for": self.held_for,
                "failures": {str(phase): why for phase, why in self.failures.items()},
                "under_way": self.under_way,
                "voting": self.voting,
                "admitted": self.admitted,
                "doubts": [[*block, owner] for block, owner in self.doubts.items()],
                "reporter": self.reporter,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_text(cls, text: str, record_of: Callable[[str], StepRecord] = StepRecord.from_json) -> Report:
        """Inverse of :meth:`to_text`. Raises ``ValueError`` for anything else.

        ``record_of``: a record's text → the record.
        """
        raw = json.loads(text)
        return cls(
            Holdings.from_json(raw["holdings"], record_of),
            int(raw["phase"]),
            bool(raw["done"]),
            int(raw["parameters"]),
            str(raw["held_for"]),
            {int(phase): str(why) for phase, why in raw["failures"].items()},
            bool(raw["under_way"]),
            str(raw["voting"]),
            int(raw["admitted"]),
            {(int(unit), int(shard), int(index)): int(owner) for unit, shard, index, owner in raw["doubts"]},
            int(raw["reporter"]),
        )


def first_open(reports: Iterable[Report]) -> int:
    """Return the first open phase, unless all ranks have done it (a newcomer has not)."""
    return max(report.first_open for report in reports)


def phase_is_over(phase: int, reports: Mapping[int, Report], members: Collection[int]) -> bool:
    """Return whether fenced phase ``phase`` is over; all members conclude alike.

    A newcomer has no report and has not begun the phase.
    """
    if first_open(reports.values()) > phase:
        return True
    # A rank that is still in an earlier phase has not begun this one and needs the other ranks for it.
    all_have_done = all(report.phase == phase and report.done for report in reports.values())
    # A reporter that is lost may have logged nothing.
    return all_have_done and reports.keys() == set(members) and all(r.reporter in members for r in reports.values())


def newcomers(decision: Decision) -> tuple[int, ...]:
    """Return the members without a report, which receive a join state, ascending."""
    nothing = [number for number, text in enumerate(decision.texts) if text == NEWCOMER]
    text_of = decision.text_of
    return tuple(sorted(rank for rank in decision.members if rank not in text_of or text_of[rank] in nothing))


def reports_of(decision: Decision) -> dict[int, Report]:
    """Return rank → its report, of the members that are no newcomers. Reports and records that are equal are one."""
    record_of = functools.cache(StepRecord.from_json)
    said = [None if text == NEWCOMER else Report.from_text(text, record_of) for text in decision.texts]
    reports = ((rank, said[number]) for rank, number in decision.text_of.items())
    return {rank: report for rank, report in reports if report is not None}


def joined_since_vote(reports: Mapping[int, Report]) -> set[int]:
    """Return the ranks that joined after the newest vote.

    Copies that the vote names on them were lost with an earlier incarnation.
    """
    records = [record for report in reports.values() for record in report.holdings.records]
    newest = max(records, key=lambda record: record.version)
    voted = 0 if newest.gradient is None else newest.gradient.generation
    return {rank for rank, report in reports.items() if report.admitted > voted}
