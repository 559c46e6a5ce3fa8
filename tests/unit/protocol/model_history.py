"""The event log that ranks of the bounded model would write on a walk through it, for the history checker.

A walk goes on where a claim of the model breaks, since an engine without the rule would. The norm of a step says
whether the parameters that it was computed from were right: of one version, and of gradients that are finite.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from tests.unit.protocol.protocol_explore import done
from tests.unit.protocol.protocol_model import Model
from tests.unit.protocol.protocol_state import ATTEMPTS, Chain, Layout, Rank, Setting, State, initial_state
from tools.history.judge import Rules, Verdict, compare, judge
from tools.history.lines import Life, Line

__all__ = ["Way", "findings", "judged", "walk"]

Way = Sequence[tuple[State, str]]
BATCH = 8
MOST_ACTIONS = 400


class Unclaimed(Model):
    """The model without its claims."""

    def broken(self, claim: str) -> None:
        """Go on."""


def walk(setting: Setting, dice: random.Random, beginning: Way = ()) -> list[State]:
    """Return the states of a walk to its end, behind the actions of ``beginning``."""
    model, states = Unclaimed(setting), [initial_state(setting)]
    for _, action in beginning:
        states.append(next(after for name, after in model.successors(states[-1]) if name == action))
    while len(states) < MOST_ACTIONS:
        following = list(model.successors(states[-1]))
        if done(states[-1]) or not any(model.is_progress(action) for action, _ in following):
            break
        states.append(dice.choice(following)[1])
    return states


@dataclass
class _Log:
    setting: Setting
    lines: list[Line] = field(default_factory=list)
    read_by: dict[int, bool] = field(default_factory=dict)
    """Rank → whether the parameters that it gathered last were right."""
    told: set[int] = field(default_factory=set)
    """Ranks whose loss was told."""
    promised: tuple[Any, ...] = ()
    named: set[tuple[int, Layout]] = field(default_factory=set)
    """(rank, placement) of votes so far."""
    joined: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank → facts of its copies when it joined the vote last."""
    retained: dict[int, int] = field(default_factory=dict)
    """Rank → most gradients of one block since it joined a vote."""
    applied: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)
    """Rank → (version, step, generation, attempt): updates of its copies since the step before."""

    def __post_init__(self) -> None:
        self.model = Unclaimed(self.setting)
        ranks = range(self.setting.ranks)
        self.retained, self.applied = dict.fromkeys(ranks, 0), {rank: set() for rank in ranks}

    def say(self, rank: int, kind: str, generation: int, **fields: Any) -> None:
        now = len(self.lines) + 1
        self.lines.append(Line(f"rank{rank}", now, kind, Life(rank, 0), generation, now, fields))

    def record(self, rank: int, source: str, generation: int, chain: Chain, **more: Any) -> None:
        nothing: dict[str, Any] = {
            "before": "",
            "samples": None,
            "gradient": None,
            "ledger": "",
            "grad_norm": 0.0,
            "members": [],
        }
        step, digest = len(chain), repr(chain)
        self.say(rank, "record", generation, **{**nothing, "step": step, "skipped": False, **more, "source": source})
        self.lines[-1].fields["digest"] = digest

    def begin(self, state: State) -> None:
        ranks = list(range(self.setting.ranks))
        for rank in ranks:
            self.say(rank, "begin", 0, run="model", clock="one")
            self.read_by[rank] = True
        for rank in ranks:
            self.record(rank, "start", 1, (), members=ranks, placement=repr(state.ranks[rank].stands))
        self._promise(0, state.ranks[0])

    def change(self, before: State, state: State) -> None:
        """The lines of all ranks between two states."""
        if state.decided > before.decided:
            for r, rank in enumerate(state.ranks):
                if rank.alive:
                    self._report(r, rank, state)
        for r, (old, new) in enumerate(zip(before.ranks, state.ranks, strict=True)):
            self._note(r, old, new, state)
            if new.generation > old.generation:
                self._adopt(r, new, state)
            elif len(new.chain) > len(old.chain):
                self._vote(r, old, new, state)
            elif old.phase == "U" and new.phase != "U":
                self._gather(r, new, state)

    def _adopt(self, r: int, rank: Rank, state: State) -> None:
        members = sorted(state.decision.members)
        decision, step = state.decision, len(rank.chain)
        again = [step, *divmod(decision.key, ATTEMPTS)] if decision.kind == "revote" else None
        gradient = [step - 1, *divmod(rank.chain[-1], ATTEMPTS)] if step else None
        chosen = {"resolution": decision.kind, "again": again, "gradient": gradient, "placement": repr(rank.stands)}
        self.record(r, "decision", rank.generation, rank.chain, members=members, **chosen)
        lost = [other for other, one in enumerate(state.ranks) if not one.alive and other not in members]
        for other in lost:
            self.say(r, "loss", rank.generation, lost_rank=other, lost_incarnation=0, step=len(rank.chain))
        self.told |= set(lost)

    def _facts(self, step: int, right: bool) -> dict[str, Any]:
        norm = 1.0 / step if right else float("nan")
        return {"samples": [BATCH * (step - 1), BATCH * step], "ledger": f"ledger{step}", "grad_norm": norm}

    def _vote(self, r: int, old: Rank, new: Rank, state: State) -> None:
        step, key = len(new.chain), new.chain[-1]
        right = all(self.read_by[m] for m in state.decision.members if m < self.setting.computing)
        facts = {**self._facts(step, right), **self.joined.pop(r), "placement": repr(new.layout)}
        facts["homes"] = [] if (r, new.layout) in self.named else _homes(new.layout)
        self.named.add((r, new.layout))
        gradient = [step - 1, *divmod(key, ATTEMPTS)]
        self.record(r, "vote", new.generation, new.chain, before=repr(old.chain), gradient=gradient, **facts)

    def _gather(self, r: int, rank: Rank, state: State) -> None:
        chains = [dict(state.ranks[owner].copies).get(b, ()) for b, (owner, *_) in enumerate(rank.stands)]
        refused = self.setting.refuse and any(chain[:1] == (ATTEMPTS,) for chain in chains)
        step = len(rank.chain)
        torn = any(b in state.ranks[owner].torn for b, (owner, *_) in enumerate(rank.stands))
        right = not refused and not torn and all(len(chain) >= step for chain in chains)
        self.read_by[r] = right
        self.say(r, "phases", rank.generation, step=step, applied=sorted(self.applied[r]))
        self.applied[r] = set()
        if r == min(m for m in state.decision.members if state.ranks[m].alive):
            self._promise(r, rank)
        vote = [line for line in self.lines if line.kind == "record" and line.source == "vote" and line.step == step]
        if vote and r == min(m for m in state.decision.members if state.ranks[m].alive):
            said = vote[-1].fields
            told = {name: said[name] for name in ("samples", "ledger", "grad_norm", "skipped")}
            self.say(r, "step", rank.generation, step=step, **told)

    def _note(self, r: int, old: Rank, new: Rank, state: State) -> None:
        """Facts of a rank's copies, as the engine notes them where they happen."""
        most = max((sum(g[0] == b for g in new.gradients) for b in range(self.setting.computing)), default=0)
        self.retained[r] = max(self.retained[r], most)
        before = dict(old.copies)
        for block, chain in new.copies:
            if block in before and len(chain) == len(before[block]) + 1:
                self.applied[r].add((len(chain), len(chain) - 1, *divmod(chain[-1], ATTEMPTS)))
        if old.phase == "S" and new.phase == "V":
            self.joined[r] = self._joined(r, new, state)
            self.retained[r] = 0

    def _joined(self, r: int, rank: Rank, state: State) -> dict[str, Any]:
        """Facts of a rank that joins a vote: of the copies that the vote names, and of those that are missing."""
        decision, named = state.decision, rank.voted_for
        oldest = min((len(chain) for b, chain in rank.copies if r in rank.names[b]), default=-1)
        due = min(self.setting.mirrors + 1, len(decision.members))
        short = sum(len(ranks) < due for ranks in named)
        made = self.setting.replenish and decision.wanted != decision.base and rank.generation == state.decided
        first = rank.key // ATTEMPTS == rank.generation and rank.step == decision.first
        return {
            "oldest": oldest,
            "retained": self.retained[r],
            "coming": decision.fits if made and first else None,
            "short": short if made and first else 0,
        }

    def _report(self, r: int, rank: Rank, state: State) -> None:
        """What a rank reports; and if state is lost, which copies of that it holds."""
        held, decision = self.model._report(r, rank), state.decision
        rows = [[*key, *self._rows(first, end)] for key, spans in held.statistics for first, end in spans]
        self.say(
            r,
            "report",
            rank.generation,
            step=len(rank.chain),
            oldest=held.oldest,
            newest=held.newest,
            gradients=[list(key) for key in held.gradients],
            rows=rows,
            voting=repr(rank.names),
            torn=len(held.torn),
            admitted=False,
        )
        if decision.kind == "lost":
            gradients = {b: [(s, *divmod(g, ATTEMPTS)) for c, s, g in rank.gradients if c == b] for b, _ in rank.copies}
            lost = [(b, chain) for b, chain in rank.copies if b in decision.missing and b not in rank.torn]
            copies = [(b, 0, 0, len(chain), gradients[b]) for b, chain in lost]
            self.say(r, "lost_state", rank.generation, step=decision.first, blocks=len(decision.missing), held=copies)

    def _rows(self, first: int, end: int) -> tuple[int, int]:
        return BATCH * first // self.setting.ranks, BATCH * end // self.setting.ranks

    def _promise(self, r: int, rank: Rank) -> None:
        """The losses that the job says it survives, where that changes."""
        homes = _homes(rank.stands)
        ranks = min(map(len, homes)) - 1
        if self.promised != (ranks, homes):
            self.promised = ranks, homes
            counted = {"homes": homes, "placement": repr(rank.stands)}
            self.say(r, "tolerance", rank.generation, step=len(rank.chain), ranks=ranks, **counted)

    def end(self, state: State) -> None:
        """The end of the training, or of ranks that are told that the state is lost."""
        lost = state.decision.kind == "lost"
        for r, rank in enumerate(state.ranks):
            step = len(rank.chain)
            why = f"state of step {step} is lost: 1 blocks of units [0] have no surviving copy" if lost else ""
            if rank.alive and (lost or rank.phase == "E"):
                self.say(r, "end", rank.generation, step=step, code=4 if lost else 0, why=why)


def _homes(layout: Layout) -> list[tuple[int, ...]]:
    return sorted({tuple(sorted(ranks)) for ranks in layout})


def judged(setting: Setting, states: Sequence[State]) -> list[str]:
    """Return what the checker finds in a walk: violations, other norms than the right ones, ranks that hang."""
    log = _Log(setting)
    log.begin(states[0])
    for before, after in pairwise(states):
        log.change(before, after)
    log.end(states[-1])
    verdict = judge(log.lines, Rules(exact=True, state_mode=setting.state_mode))
    found = [str(one) for one in verdict.violations]
    right = Verdict(facts={step: _right(log, step) for step in verdict.facts})
    found += compare(verdict, right)
    alive = {str(Life(r, 0)) for r, rank in enumerate(states[-1].ranks) if rank.alive}
    found += [f"all ended: {life} hung" for life in sorted(alive & set(verdict.unended))]
    return found


def _right(log: _Log, step: int) -> tuple[Any, ...]:
    facts = log._facts(step, right=True)
    return (*facts["samples"], facts["ledger"], repr(facts["grad_norm"]), False)


def findings(setting: Setting, beginning: Way, seeds: Iterable[int]) -> list[str]:
    """Return what the checker finds in the first walk, behind a part of ``beginning``, in which it finds anything.

    A walk is one step longer than ``setting``, so that a wrong state has a gradient that shows it.
    """
    setting = replace(setting, steps=setting.steps + 1)
    for seed in seeds:
        kept = len(beginning) - seed % (len(beginning) + 1)
        found = judged(setting, walk(setting, random.Random(seed), beginning[:kept]))
        if found:
            return found
    return []
