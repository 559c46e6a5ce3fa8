"""Judge what ranks log of their copies of state: when they were updated and by what, which ones counted after a loss.

A rank logs facts of its copies with each vote, after each step, before it reports after a loss, and when state is lost.
From them and the records follows, whatever the records say:

updated in time       a rank joins a vote only with copies that are all at the version before it, and no copy retains
                      more than two gradients: the back-pressure of a rank that falls behind
one gradient          copies are updated by the gradients that the record names: same generation, same attempt
vote taken again      a step whose vote only lost ranks knew is committed by the same gradients if all survivors have
                      them, with the statistics of the whole batch and copies of all blocks
copies named in time  the vote names the missing copies once all its voters say that these will be there
every copy counts     state is not lost while a survivor holds a copy that can go on, named by a vote or not
promise               a job says that it survives no more losses than the copies allow that a vote or decision named

A copy can go on at the newest version, or one before it with the gradient between. It counts if it also has every
gradient that its rank reports as complete, and if its rank has voted since it was let in (docs/design.md §3.5).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tools.history.lines import Life, Line
from tools.history.verdict import Verdict

__all__ = ["check_copies"]

SLOTS = 2
"""Gradients that a copy may retain."""
NOTHING = -1
"""Version of a rank without copies."""

Key = tuple[int, ...]
"""Step, generation and attempt of a gradient."""


def check_copies(lines: Sequence[Line], lives: Mapping[Life, Sequence[Line]], found: Verdict) -> None:
    """Add violations of the rules above; ``lives``: the same lines by incarnation, in the order written."""
    records = [line for line in lines if line.kind == "record"]
    votes = [line for line in records if line.source == "vote"]
    for line in votes:
        _check_in_time(line, found)
    for own in lives.values():
        _check_gradients(own, found)
        _check_lost_state(own, records, found)
    _check_named_in_time(records, found)
    homes = {line.fields["placement"]: line.fields["homes"] for line in votes if line.fields.get("homes")}
    for decided in _decisions(lives):
        _check_vote_again(decided, votes, homes, found)
    _check_promises(lines, records, homes, found)


def _check_in_time(line: Line, found: Verdict) -> None:
    oldest, retained = line.fields.get("oldest"), line.fields.get("retained", 0)
    if oldest is not None and oldest != NOTHING and oldest < line.step - 1:
        text = f"{line.life} joins the vote on step {line.step} with a copy at version {oldest}"
        found.add("updated in time", text, line)
    if retained > SLOTS:
        text = f"{line.life} retained {retained} gradients of one block up to the vote on step {line.step}"
        found.add("updated in time", text, line)


def _check_gradients(own: Sequence[Line], found: Verdict) -> None:
    named: dict[int, dict[Key, Line]] = defaultdict(dict)
    for line in own:
        if line.kind == "record" and line.fields.get("gradient") is not None:
            named[line.step][tuple(line.fields["gradient"])] = line
        for version, *key in line.fields.get("applied", ()) if line.kind == "phases" else ():
            if version in named and tuple(key) not in named[version]:
                by, *_ = named[version].values()
                text = f"{line.life} updates copies to version {version} by gradients {key}"
                found.add("one gradient", f"{text}, the vote was on {by.fields['gradient']}", by, line)


# -- missing copies ------------------------------------------------------------------


def _check_named_in_time(records: Sequence[Line], found: Verdict) -> None:
    members: dict[int, set[int]] = {}
    votes: dict[tuple[int, int, str], list[Line]] = defaultdict(list)
    for line in records:
        if line.source == "vote":
            votes[line.generation, line.step, line.digest].append(line)
        else:
            members.setdefault(line.generation, set(line.fields["members"]))
    for (generation, step, _), group in votes.items():
        short = max(line.fields.get("short", 0) for line in group)
        here = {line.life.rank for line in group} >= members.get(generation, {NOTHING})
        own = group[0].fields["gradient"] is not None and group[0].fields["gradient"][1] == generation
        if short and here and own and all(line.fields["coming"] for line in group):
            text = f"the vote on step {step} leaves {short} blocks short, and all said that their copies would be there"
            found.add("copies named in time", text, *group)


# -- after a loss ----------------------------------------------------------------------


class _Decided(NamedTuple):
    """A decision as all its members logged it, each with its report."""

    basis: Line
    lives: frozenset[Life]
    reports: tuple[Line, ...]


def _decisions(lives: Mapping[Life, Sequence[Line]]) -> Iterator[_Decided]:
    """Yield the decisions of which every member logged its report and the outcome: no newcomer is among them."""
    taken: dict[int, list[tuple[Line, Line | None]]] = defaultdict(list)
    for own in lives.values():
        report: Line | None = None
        for line in own:
            if line.kind == "report":
                report = line
            elif line.kind == "record":
                if line.source == "decision":
                    taken[line.generation].append((line, report))
                report = None
    for _, group in sorted(taken.items()):
        basis = group[0][0]
        reports = tuple(report for _, report in group if report is not None)
        there = frozenset(line.life for line, _ in group)
        if len(reports) == len(group) and {life.rank for life in there} == set(basis.fields["members"]):
            yield _Decided(basis, there, reports)


def _check_vote_again(
    decided: _Decided, votes: Sequence[Line], homes: Mapping[str, Sequence[Sequence[int]]], found: Verdict
) -> None:
    basis = decided.basis
    for vote in votes:
        if vote.step != basis.step + 1 or vote.generation >= basis.generation or vote.life in decided.lives:
            continue
        taken_again = basis.fields.get("resolution") == "revote" and basis.fields["again"] == vote.fields["gradient"]
        if not taken_again and _can_vote(decided, vote, homes):
            text = f"{vote.life} committed step {vote.step}, and all others could take its vote again"
            done = basis.fields["resolution"]
            found.add("vote taken again", f"{text}; the decision was {done}", vote, basis, *decided.reports)
            return


def _can_vote(decided: _Decided, vote: Line, homes: Mapping[str, Sequence[Sequence[int]]]) -> bool:
    """Return whether survivors certainly hold all that it needs to take ``vote`` again.

    ``homes``: digest of a configuration that some vote named → sets of ranks that hold all copies of some block.
    """
    said, key = [report.fields for report in decided.reports], _key_of(vote)
    voting = {one["voting"] for one in said}
    if len(voting) > 1 or voting.isdisjoint(homes) or any(one["torn"] or one["admitted"] for one in said):
        return False
    ready = all(key in _keys(one["gradients"]) and _reaches(one, decided.basis) for one in said)
    spans = sorted((first, end) for one in said for *of, first, end in one["rows"] if tuple(of) == key)
    holders = {report.life.rank for report in decided.reports if report.fields["newest"] != NOTHING}
    first, end = vote.fields["samples"]
    return ready and _covers(spans, end - first) and all(holders & set(home) for home in homes[voting.pop()])


def _reaches(report: Mapping[str, Any], basis: Line) -> bool:
    """Return whether a rank knows no record beyond that of ``basis`` and can bring all its copies there."""
    if report["step"] > basis.step or report["newest"] > basis.step:
        return False
    with_gradient = basis.fields["skipped"] or _key_of(basis) in _keys(report["gradients"])
    return bool(report["newest"] == NOTHING or report["oldest"] >= basis.step - int(with_gradient))


def _covers(spans: Sequence[tuple[int, int]], rows: int) -> bool:
    reached = 0
    for first, end in spans:
        if first > reached:
            return False
        reached = max(reached, end)
    return reached >= rows


def _check_lost_state(own: Sequence[Line], records: Sequence[Line], found: Verdict) -> None:
    report: Line | None = None
    for line in own:
        if line.kind == "report":
            report = line
        if line.kind != "lost_state" or report is None or report.fields["admitted"]:
            continue
        known = (one for one in records if one.step == line.step and one.generation <= line.generation)
        basis = max(known, key=lambda one: one.generation, default=None)  # a job begun anew may commit it again
        complete = _keys(report.fields["gradients"])
        for *block, version, held in line.fields["held"]:
            keys = _keys(held)
            able = version == line.step or (version == line.step - 1 and basis is not None and _key_of(basis) in keys)
            if able and all(version > key[0] or key in keys for key in complete):
                text = f"state of step {line.step} is lost, and {line.life} holds block {tuple(block)}"
                found.add("every copy counts", f"{text} at version {version}", report, line)


# -- promises ----------------------------------------------------------------------------


def _check_promises(
    lines: Sequence[Line], records: Sequence[Line], homes_of: Mapping[str, Sequence[Sequence[int]]], found: Verdict
) -> None:
    """``homes_of``: digest of a configuration that a vote named → ranks that hold all copies of some block."""
    votes = (line for line in records if line.source == "vote")
    voted = {(line.generation, line.step): str(line.fields.get("placement", "")) for line in votes}
    named: dict[str, int] = {}
    for line in records:
        digest = str(line.fields.get("placement", ""))
        named[digest] = min(line.generation, named.get(digest, line.generation))
    for line in lines:
        homes = line.fields.get("homes") if line.kind == "tolerance" else None
        if not homes:
            continue
        fewest, promised = min(len(set(home)) for home in homes), line.fields["ranks"]
        if promised >= fewest:
            text = f"{line.life} says that any {promised} ranks can be lost, and some block has {fewest} copies"
            found.add("promise", text, line)
        # A copy whose memory has changed is dropped behind a vote that names it.
        kept = homes_of.get(voted.get((line.generation, line.step), ""), ())
        fewer = all(any(set(home) <= set(one) for one in kept) for home in homes)
        if named.get(line.fields["placement"], line.generation + 1) > line.generation and not fewer:
            found.add("promise", f"{line.life} counts copies that neither a vote nor a decision named", line)


def _keys(listed: Sequence[Sequence[int]]) -> set[Key]:
    return {tuple(key) for key in listed}


def _key_of(line: Line) -> Key | None:
    gradient = line.fields["gradient"]
    return None if gradient is None else tuple(gradient)
