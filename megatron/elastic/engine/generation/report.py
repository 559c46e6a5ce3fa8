"""What a rank reports at FREEZE: versions, gradients, and where in the program it stands.

The control plane carries the text without reading it; every member reads every
report from the decision record and draws the same conclusion.

Phases: each step and each fenced action of the host's loop has a number, equal
on all ranks. ``done`` says that this rank finished the action's body and was
only waiting for the others. If anybody is past the phase, or all are done,
it is over for everybody; otherwise it is repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.elastic.control.membership import Decision
from megatron.elastic.state.protocol import Holdings

__all__ = ["NEWCOMER", "Report", "first_open", "joined_since_vote", "newcomers", "phase_is_over", "reports_of"]

NEWCOMER = ""
"""Report of a rank that has no state yet."""


@dataclass(frozen=True)
class Report:
    """One rank's answer to FREEZE."""

    holdings: Holdings
    phase: int
    done: bool
    parameters: int
    """Version of the parameters; older than the state when a gather was cut short."""
    failure: str = ""
    """Why the present fenced action cannot be done, where it failed on this rank."""
    under_way: bool = True
    """Whether the phase is not over, as far as this rank knows."""
    voting: str = ""
    """Digest of the basis that the vote under way here is to name."""
    admitted: int = 0
    """Generation that let this rank in, if it has not voted since: no vote named a copy it holds."""

    @property
    def first_open(self) -> int:
        """The first phase that is not over, as far as this rank knows."""
        return self.phase + (not self.under_way)

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps(
            {
                "holdings": self.holdings.to_json(),
                "phase": self.phase,
                "done": self.done,
                "parameters": self.parameters,
                "failure": self.failure,
                "under_way": self.under_way,
                "voting": self.voting,
                "admitted": self.admitted,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_text(cls, text: str) -> Report:
        """Inverse of :meth:`to_text`. Raises ``ValueError`` for anything else."""
        raw = json.loads(text)
        return cls(
            Holdings.from_json(raw["holdings"]),
            int(raw["phase"]),
            bool(raw["done"]),
            int(raw["parameters"]),
            str(raw["failure"]),
            bool(raw["under_way"]),
            str(raw["voting"]),
            int(raw["admitted"]),
        )


def first_open(reports: Iterable[Report]) -> int:
    """The first phase that is not over, if not all have done it (a newcomer has not)."""
    return max(report.first_open for report in reports)


def phase_is_over(phase: int, reports: Mapping[int, Report], members: int) -> bool:
    """Whether fenced phase ``phase`` need not be repeated, as every one of ``members`` concludes alike.

    A newcomer, which has no report, has done nothing of it.
    """
    newest = first_open(reports.values())
    # Who is still in the phase before has done nothing of this one, and needs the others for it.
    everybody = len(reports) == members and all(report.phase == phase for report in reports.values())
    return newest > phase or (everybody and all(report.done for report in reports.values()))


def newcomers(decision: Decision) -> tuple[int, ...]:
    """Members that have to be told everything, ascending."""
    return tuple(sorted(rank for rank in decision.members if decision.reports.get(rank, NEWCOMER) == NEWCOMER))


def reports_of(decision: Decision) -> dict[int, Report]:
    """Rank → its report, of the members that are no newcomers."""
    return {rank: Report.from_text(text) for rank, text in decision.reports.items() if text != NEWCOMER}


def joined_since_vote(reports: Mapping[int, Report]) -> set[int]:
    """Ranks that came after the newest vote: the copies that it named under their number died with an earlier life."""
    records = [record for report in reports.values() for record in report.holdings.records]
    newest = max(records, key=lambda record: record.version)
    voted = 0 if newest.gradient is None else newest.gradient.generation
    return {rank for rank, report in reports.items() if report.admitted > voted}
