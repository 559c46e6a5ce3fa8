"""Decide whether the lines of one launch of a job tell one history.

Each rank writes a ``record`` line before it acts on a record: after a vote (the commit of a step), and at the begin of
a generation. A generation begins at its *basis*, the record that all its members take. From these lines alone
follows, without any clock but where two ranks share one:

one history      all votes and bases lie on one chain of digests: each vote names the record before it
committed once   the versions of a chain grow by one; in a generation, all ranks have the same record of a version
not undone       no rank that goes on takes a record that is older than its own. The record of a vote that only lost
                 ranks knew may be replaced, by one over the same samples; so may one step at most
each sample once the steps of the chain use adjacent ranges of samples; no two have the same ledger
void generations no line of an incarnation belongs to a generation that it has left, that it is no member of, or in
                 which it counts as lost; nor is it later than the begin of the next one, by the same clock
all logged       of each generation that committed a step, every member has logged the begin
all ended        each incarnation ended on purpose, was told lost, or has a successor
state kept       state is not lost with no more losses than the job said it survives
one fingerprint  (exact mode) gradient norms have the same bits whenever a step is computed

The rules of copies are in :mod:`copies`. A step's facts are its samples, its ledger and its norm. A job that goes back
to a checkpoint begins a new segment: the steps that are computed again must have the same samples and ledgers.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tools.history.copies import check_copies
from tools.history.lines import Life, Line
from tools.history.verdict import Rules, Verdict, facts_of

__all__ = ["Rules", "Verdict", "compare", "judge"]

BASES = ("start", "load", "decision", "join")
ANEW = ("start", "load")
ACTS = ("record", "phases")
_CALM = (0, 3)
"""Exit statuses of ranks that came to the end of the training, or were drained."""
_DEFAULT = Rules()
LOST_STATE = re.compile(r"state of step \d+ is lost")


def judge(lines: Sequence[Line], rules: Rules = _DEFAULT) -> Verdict:
    """Judge one launch: lines of a rank in the order written."""
    found = Verdict()
    lives: dict[Life, list[Line]] = defaultdict(list)
    for line in lines:
        lives[line.life].append(line)
    generations = _generations(lines, found)
    found.lives, found.generations = len(lives), len(generations)
    lost = _losses(lines, found)
    for life, own in lives.items():
        _check_life(life, own, rules, found)
        _check_member(life, own, generations, lost.get(life), found)
    _check_successors(lines, found)
    _check_clocks(lines, found)
    chain = _Chain(generations, rules, found)
    chain.follow()
    _check_reported(lines, chain, found)
    _check_promises(lines, lives, found)
    check_copies(lines, lives, found)
    if not rules.running:
        _check_ends(lives, lost, chain.last, found)
    return found


# -- generations -------------------------------------------------------------------


@dataclass
class _Generation:
    """Lines of one generation."""

    number: int
    bases: list[Line] = field(default_factory=list)
    votes: dict[int, list[Line]] = field(default_factory=lambda: defaultdict(list))
    members: dict[tuple[int, ...], Line] = field(default_factory=dict)
    """Member lists that were told."""

    @property
    def begins_anew(self) -> bool:
        return any(line.source in ANEW for line in self.bases)


def _generations(lines: Iterable[Line], found: Verdict) -> dict[int, _Generation]:
    made: dict[int, _Generation] = {}
    for line in lines:
        if line.kind not in ("record", "generation"):
            continue
        here = made.setdefault(line.generation, _Generation(line.generation))
        if line.kind == "record" and line.source == "vote":
            here.votes[line.step].append(line)
            continue
        if line.kind == "record":
            here.bases.append(line)
        here.members.setdefault(tuple(line.fields["members"]), line)
    for number, here in sorted(made.items()):
        if len(here.members) > 1:
            told = " and ".join(str(list(members)) for members in here.members)
            found.add("one history", f"generation {number} has members {told}", *here.members.values())
        for name, group in (("begins with", here.bases), *((f"has step {s} as", v) for s, v in here.votes.items())):
            records: dict[tuple[int, str], Line] = {}
            for line in group:
                records.setdefault((line.step, line.digest), line)
            if len(records) > 1:
                told = " and ".join(
                    f"record {digest[:12]} of step {step} on {line.life}" for (step, digest), line in records.items()
                )
                found.add("one history", f"generation {number} {name} {told}", *records.values())
        _check_lives(here, found)
        _check_logged(here, found)
    return dict(sorted(made.items()))


def _check_lives(here: _Generation, found: Verdict) -> None:
    """A rank is one incarnation in a generation."""
    first: dict[int, Line] = {}
    for line in (*here.bases, *(one for group in here.votes.values() for one in group)):
        other = first.setdefault(line.life.rank, line)
        if other.life != line.life:
            found.add("void generations", f"{other.life} and {line.life} act in generation {here.number}", other, line)
            return


def _check_logged(here: _Generation, found: Verdict) -> None:
    """A vote takes all members, each of which has logged the begin: without its line a file is missing or not whole."""
    votes = [line for group in here.votes.values() for line in group]
    logged = {line.life.rank for line in here.bases}
    for rank in sorted({rank for members in here.members for rank in members} - logged if votes else ()):
        text = f"generation {here.number} committed step {votes[0].step}, and member {rank} logged no begin of it"
        found.add("all logged", f"{text}: is its file here?", votes[0])


def _losses(lines: Iterable[Line], found: Verdict) -> dict[Life, Line]:
    """Each incarnation that was told lost → the line with the earliest generation that says so."""
    lost: dict[Life, Line] = {}
    for line in lines:
        if line.kind == "loss":
            life = Life(int(line.fields["lost_rank"]), int(line.fields["lost_incarnation"]))
            if life not in lost or line.generation < lost[life].generation:
                lost[life] = line
    found.losses = len(lost)
    return lost


# -- one incarnation ---------------------------------------------------------------


def _check_life(life: Life, lines: Sequence[Line], rules: Rules, found: Verdict) -> None:
    """The records of one incarnation follow one another."""
    held: Line | None = None
    basis: Line | None = None
    for line in lines:
        if line.kind == "phases" and (held is None or line.step != held.step):
            has = "no record" if held is None else f"that of step {held.step}"
            found.add("committed once", f"{life} ends step {line.step} and holds {has}", line)
        if line.kind != "record":
            continue
        if line.source == "vote":
            _check_vote(life, line, held, basis, found)
        else:
            _check_basis(life, line, held, basis, rules, found)
            basis = line
        held = line


def _check_vote(life: Life, line: Line, held: Line | None, basis: Line | None, found: Verdict) -> None:
    if held is None or basis is None:
        found.add("one history", f"{life} votes on step {line.step} and holds no record", line)
        return
    if line.step <= held.step:
        found.add("committed once", f"{life} commits step {line.step} and holds step {held.step}", held, line)
    elif line.step > held.step + 1:
        text = f"{life} commits step {line.step} after step {held.step}: {_steps(held.step + 1, line.step - 1)} missing"
        found.add("committed once", text, held, line)
    elif line.fields["before"] != held.digest:
        text = f"{life} holds record {held.digest[:12]} of step {held.step}; its next vote is on another one"
        found.add("one history", text, held, line)
    if line.generation != basis.generation:
        text = f"{life} commits step {line.step} in generation {line.generation}, and is in {basis.generation}"
        found.add("void generations", text, basis, line)
    gradient = line.fields["gradient"]
    again = gradient is not None and gradient[1] < line.generation
    if gradient is None or gradient[0] != line.step - 1 or gradient[1] > line.generation:
        found.add("one history", f"{life} commits step {line.step} with gradients {gradient}", line)
    elif again and line.step != basis.step + 1:
        text = f"{life} commits step {line.step} in generation {line.generation} with gradients of {gradient[1]}"
        found.add("void generations", text, basis, line)


def _check_basis(life: Life, line: Line, held: Line | None, basis: Line | None, rules: Rules, found: Verdict) -> None:
    # A loss may cut an admission short: then the newcomer joins again.
    joins_again = line.source == "join" and basis is not None and basis.source == "join" and held is basis
    if (line.source == "decision") != (held is not None) and not joins_again:
        found.add("one history", f"{life} begins generation {line.generation} by {line.source}", line)
        return
    if held is None or basis is None:
        return
    if line.generation <= basis.generation:
        text = f"{life} goes from generation {basis.generation} to {line.generation}"
        found.add("void generations", text, basis, line)
    undone = held.step - line.step
    if undone > int(rules.state_mode):
        text = f"{life} knew of step {held.step} and goes on from step {line.step}: {_steps(line.step + 1, held.step)}"
        found.add("not undone", f"{text} undone", held, line)
    elif undone == 0 and held.digest != line.digest and not rules.state_mode:
        text = f"{life} held record {held.digest[:12]} of step {held.step} and goes on with {line.digest[:12]}"
        found.add("not undone", text, held, line)


def _check_member(
    life: Life, lines: Sequence[Line], generations: Mapping[int, _Generation], lost: Line | None, found: Verdict
) -> None:
    """An incarnation acts in generations that it is a member of, and not once it counts as lost or has ended."""
    ended: Line | None = None
    newest = -1
    for line in lines:
        if line.kind == "end":
            ended = line
        if line.kind not in ACTS:
            continue
        if ended is not None:
            found.add("void generations", f"{life} acts after its end", ended, line)
        if line.generation < newest:
            found.add("void generations", f"{life} acts in generation {line.generation} after {newest}", line)
        newest = max(newest, line.generation)
        here = generations.get(line.generation)
        told = next(iter(here.members.items()), None) if here is not None else None
        if told is not None and life.rank not in told[0]:
            text = f"{life} acts in generation {line.generation}, whose members are {list(told[0])}"
            found.add("void generations", text, told[1], line)
        if lost is not None and line.generation >= lost.generation:
            text = f"{life} acts in generation {line.generation}, before which it was lost"
            found.add("void generations", text, lost, line)
            return


def _check_successors(lines: Iterable[Line], found: Verdict) -> None:
    """No incarnation acts after its successor has begun: a file is in the order of writing."""
    newest: dict[str, Line] = {}
    for line in lines:
        before = newest.setdefault(line.file, line)
        if line.life.incarnation > before.life.incarnation:
            newest[line.file] = line
        elif line.life.incarnation < before.life.incarnation and line.kind in ACTS:
            found.add("void generations", f"{line.life} acts after {before.life} has begun", before, line)


def _check_clocks(lines: Sequence[Line], found: Verdict) -> None:
    """No line is later than the begin of a later generation, where both have one clock."""
    clocks = {line.life: str(line.fields["clock"]) for line in lines if line.kind == "begin"}
    begins: dict[str, dict[int, Line]] = defaultdict(dict)
    for line in lines:
        if line.kind == "record" and line.source in BASES and line.life in clocks:
            at = begins[clocks[line.life]]
            if line.generation not in at or line.monotonic_ns < at[line.generation].monotonic_ns:
                at[line.generation] = line
    for clock, at in begins.items():
        later: dict[int, Line] = {}
        """Generation → the earliest begin of one after it."""
        earliest: Line | None = None
        for generation in sorted(at, reverse=True):
            if earliest is not None:
                later[generation] = earliest
            if earliest is None or at[generation].monotonic_ns < earliest.monotonic_ns:
                earliest = at[generation]
        for line in lines:
            next_begin = later.get(line.generation) if line.kind in ACTS and clocks.get(line.life) == clock else None
            if next_begin is not None and line.monotonic_ns > next_begin.monotonic_ns:
                text = f"{line.life} acts in generation {line.generation} when {next_begin.generation} has begun"
                found.add("void generations", text, next_begin, line)


# -- the chain of all votes --------------------------------------------------------


class _Chain:
    """The records of the job, one a version, followed through its generations."""

    def __init__(self, generations: Mapping[int, _Generation], rules: Rules, found: Verdict) -> None:
        self._generations, self._rules, self._found = generations, rules, found
        self.records: dict[int, Line] = {}
        """Version → the line that brought its record, of the segment under way."""
        self.known: dict[int, list[Line]] = defaultdict(list)
        """Step → every vote on it that counts, in all segments."""
        self._dropped: dict[int, Line] = {}

    @property
    def last(self) -> int:
        """The newest version; -1 without any."""
        return max(self.records, default=-1)

    def follow(self) -> None:
        """Go through all generations in order."""
        ledgers: dict[str, Line] = {}
        for here in self._generations.values():
            if not here.bases:
                lines = [line for group in here.votes.values() for line in group]
                if lines:
                    self._found.add("one history", f"generation {here.number} has votes and no begin", *lines)
                continue
            self._begin(here)
            for step in sorted(here.votes):
                self._vote(here.votes[step][0], ledgers)
        self._found.facts = {step: facts_of(lines[-1]) for step, lines in self.known.items()}

    def _begin(self, here: _Generation) -> None:
        basis, last, found = here.bases[0], self.last, self._found
        if here.begins_anew:
            again = [step for step in self.records if step > basis.step and step in self.known]
            found.computed_again += len(again)
            self.records, self._dropped = {basis.step: basis}, {}
            return
        if basis.step > last:
            text = f"generation {here.number} begins with step {basis.step}: of {_steps(last + 1, basis.step)} no vote"
            found.add("committed once", f"{text} was logged", basis)
        elif basis.step not in self.records:
            found.add("not undone", f"generation {here.number} begins with step {basis.step}, before the job", basis)
        elif self.records[basis.step].digest != basis.digest and not self._rules.state_mode:
            text = f"generation {here.number} begins with another record of step {basis.step} than was committed"
            found.add("one history", text, self.records[basis.step], basis)
        if last > basis.step + 1:
            text = f"{_steps(basis.step + 1, last)} undone by generation {here.number}"
            found.add("not undone", text, self.records[last], basis)
        for step in range(basis.step + 1, last + 1):
            line = self.records.pop(step, None)
            if line is not None and line.source == "vote":
                self._dropped[step] = line
                self._found.replaced += 1
                if self.known[step]:
                    self.known[step].pop()
                if not self.known[step]:
                    del self.known[step]
        self.records[basis.step] = basis

    def _vote(self, line: Line, ledgers: dict[str, Line]) -> None:
        found, last = self._found, self.last
        if line.step != last + 1:
            found.add("committed once", f"step {line.step} is committed after step {last}", self.records[last], line)
        elif line.fields["before"] != self.records[last].digest:
            found.add(
                "one history", f"step {line.step} follows another record of step {last}", self.records[last], line
            )
        first, end, ledger, *_ = facts_of(line)
        before = self.known[last][-1] if self.known.get(last) else None
        if end <= first:
            found.add("each sample once", f"step {line.step} uses samples {first} to {end}", line)
        elif before is not None and first != before.fields["samples"][1]:
            told = f"step {line.step} uses samples from {first} on, step {last} up to {before.fields['samples'][1]}"
            found.add("each sample once", told, before, line)
        elif before is None and last == 0 and first != 0:
            found.add("each sample once", f"step 1 uses samples from {first} on", line)
        other = ledgers.setdefault(ledger, line) if ledger else line
        if other.step != line.step:
            text = f"steps {other.step} and {line.step} have one ledger: they used the same samples"
            found.add("each sample once", text, other, line)
        for earlier in (*self.known.get(line.step, ()), *filter(None, (self._dropped.pop(line.step, None),))):
            self._check_again(earlier, line)
        self.records[line.step] = line
        self.known[line.step].append(line)

    def _check_again(self, earlier: Line, line: Line) -> None:
        """A step that is committed again has the same facts."""
        (*samples, ledger, norm, skipped), (*samples2, ledger2, norm2, skipped2) = facts_of(earlier), facts_of(line)
        if samples != samples2 or ledger != ledger2:
            text = f"step {line.step} is committed again with other samples"
            self._found.add("each sample once", text, earlier, line)
        elif self._rules.exact and (norm, skipped) != (norm2, skipped2):
            text = f"step {line.step} has norm {norm}, and {norm2} when computed again"
            self._found.add("one fingerprint", text, earlier, line)


def _check_reported(lines: Iterable[Line], chain: _Chain, found: Verdict) -> None:
    """The ``step`` lines, which the lowest living rank writes for users, tell the steps of the chain."""
    told: dict[int, Line] = {}
    for line in lines:
        if line.kind != "step":
            continue
        told.setdefault(line.step, line)
        said = line.fields
        facts = (*said["samples"], said["ledger"], repr(said["grad_norm"]), bool(said["skipped"]))
        votes = chain.known.get(line.step, [])
        if not votes:
            found.add("not undone", f"{line.life} told of step {line.step}, which is no step of the history", line)
        elif all(facts != facts_of(vote) for vote in votes):
            found.add("one history", f"{line.life} tells step {line.step} unlike its record", line, votes[-1])
        if said.get("computed") is not None:
            found.left_out += max(0, said["samples"][1] - said["samples"][0] - said["computed"])
    for step, votes in sorted(chain.known.items()):
        if step not in told and step != chain.last:
            found.add("committed once", f"step {step} was committed, and no rank told of it", votes[-1])


# -- losses and ends ---------------------------------------------------------------


def _check_promises(lines: Sequence[Line], lives: Mapping[Life, Sequence[Line]], found: Verdict) -> None:
    """State is lost only with more losses than the newest ``tolerance`` line allows."""
    ends = [line for line in lines if line.kind == "end" and LOST_STATE.search(str(line.fields["why"]))]
    if not ends:
        return
    said = [line for line in lines if line.kind == "tolerance" and line.generation <= ends[0].generation]
    if not said:
        return
    promise = max(said, key=lambda line: (line.generation, line.monotonic_ns))
    there = {life for life, own in lives.items() if any(_acts_in(line, promise.generation) for line in own)}
    gone = {life for life in there if not any(line.kind == "end" for line in lives[life])}
    if len(gone) <= promise.fields["ranks"]:
        names = ", ".join(map(str, sorted(gone))) or "no rank"
        text = f"state is lost with {names}, though any {promise.fields['ranks']} ranks could be lost"
        found.add("state kept", text, promise, *ends)


def _acts_in(line: Line, generation: int) -> bool:
    return line.kind in ACTS and line.generation == generation


def _check_ends(lives: Mapping[Life, Sequence[Line]], lost: Mapping[Life, Line], last: int, found: Verdict) -> None:
    """Each incarnation with a record ended on purpose, counts as lost, or was replaced."""
    newest = Counter[int]()
    for life in lives:
        newest[life.rank] = max(newest[life.rank], life.incarnation)
    ends = [line for own in lives.values() for line in own if line.kind == "end"]
    given_up = any(line.fields["code"] not in _CALM for line in ends)
    for life, own in sorted(lives.items()):
        records = [line for line in own if line.kind == "record"]
        over = life in lost or life.incarnation < newest[life.rank] or any(line.kind == "end" for line in own)
        if not records or over:
            continue
        if ends and (given_up or records[-1].step == last):
            found.unended.append(str(life))
        else:
            text = f"{life} neither ended nor counts as lost: it hung, or was killed together with the job"
            found.add("all ended", text, own[-1])


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def compare(one: Verdict, other: Verdict) -> Iterator[str]:
    """Return a line for each step that both have, with other facts."""
    for step in sorted(one.facts.keys() & other.facts.keys()):
        if one.facts[step] != other.facts[step]:
            yield f"one fingerprint: step {step} is {one.facts[step]}, in the reference {other.facts[step]}"
