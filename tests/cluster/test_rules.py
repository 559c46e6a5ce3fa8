"""Rules of docs/design.md §4.6, §4.9 and §6.5 that the bounded model leaves out: without each, the engine fails.

A rule is switched off in the code that trains, and some order of events then breaks what holds after every run. The
rules of the control plane alone (13, 14, 17) are in :mod:`tests.cluster.test_control_rules`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from megatron.elastic.control.events import Decided, Entry, Event, Reported
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.journal import Journal
from megatron.elastic.control.membership import Reason
from megatron.elastic.control.messages import FROM_WORKER, Ask
from megatron.elastic.control.protocol import WorkerProtocol
from megatron.elastic.control.requests import Request
from megatron.elastic.engine.generation.report import Report
from megatron.elastic.engine.transaction import agreement
from megatron.elastic.engine.transaction.agreement import StateLost
from megatron.elastic.engine.transaction.boundary import Boundary
from megatron.elastic.engine.transaction.recover import Recovery
from tests.cluster import cluster
from tests.cluster.checks import check
from tests.cluster.control import Launched
from tests.cluster.fabric import ClusterFabric
from tests.cluster.scheduler import Scheduler
from tests.scenario.scenario import parse

LATE = 1.0
"""Seconds."""
TURNS = 30_000
"""Many times those of a run that ends; without a rule some runs do not."""


def decisions_pass_unread_entries(patch: pytest.MonkeyPatch) -> None:
    """Rule 11 off: a decision stands behind entries that its author had not read, as its author knew the job.

    Two parts of the code hold the rule: the journal appends a decision at one position only, and the state machine
    ignores one of a generation that an entry in between has ended.
    """
    apply, decide = Generations.apply, Generations._decide
    known: dict[int, Generations] = {}

    def append(journal: Journal, event: Event) -> bool:
        for _ in journal.append(event):
            pass
        return True

    def remember(state: Generations, event: Event) -> None:
        if state.ready():
            known[id(state)] = copy.deepcopy(state)
        apply(state, event)

    def decide_as_known(state: Generations, event: Decided) -> None:
        before = known.get(id(state))
        if before is not None and event.generation == before.frozen < state.frozen:
            for name in state.__struct_fields__:
                setattr(state, name, getattr(before, name))
        decide(state, event)

    patch.setattr(Journal, "append_next", append)
    patch.setattr(Generations, "apply", remember)
    patch.setattr(Generations, "_decide", decide_as_known)


def reports_stay_valid(patch: pytest.MonkeyPatch) -> None:
    """Rule 12 off: what the members reported for the generation before counts for the next one."""
    freeze, decide = Generations._freeze, Generations._decide
    before: dict[int, dict[int, Entry]] = {}

    def keep(state: Generations, event: Decided) -> None:
        if state.decided and event.generation == state.frozen and state.ready():
            before[id(state)] = dict(state.reports)
        decide(state, event)

    def freeze_with_them(state: Generations, reason: Reason) -> None:
        freeze(state, reason)
        old = {rank: entry for rank, entry in before.get(id(state), {}).items() if rank in state.members}
        state.reports = {**old, **state.reports}

    patch.setattr(Generations, "_decide", keep)
    patch.setattr(Generations, "_freeze", freeze_with_them)


def messages_name_no_generation(patch: pytest.MonkeyPatch) -> None:
    """Rule 15 off: a message of an older generation is taken for one of the present."""
    put, ask = ClusterFabric.put, ClusterFabric.ask
    patch.setattr(ClusterFabric, "put", lambda end, peer, key, value: put(end, peer, (10**9, *key[1:]), value))
    patch.setattr(ClusterFabric, "ask", lambda end, peer, key: ask(end, peer, (10**9, *key[1:])))


def copies_of_an_earlier_life_count(patch: pytest.MonkeyPatch) -> None:
    """Rule 16 off: a rank that was let in since the newest vote counts as holding what that vote names on it."""
    patch.setattr(agreement, "joined_since_vote", lambda reports: set())


def phases_end_for_each_rank_alone(patch: pytest.MonkeyPatch) -> None:
    """Rule 18 off: a rank repeats the phase that it is in, wherever the others are."""
    patch.setattr(agreement, "phase_is_over", lambda phase, reports, members: False)


def migrations_begin_before_a_vote(patch: pytest.MonkeyPatch) -> None:
    """Rule 29 off: a migration for balance begins at the first boundary behind the recovery."""
    move = Boundary._move

    def move_at_once(boundary: Boundary, leaving: tuple[int, ...], reshape: tuple[int, ...]) -> None:
        at = boundary._context
        settled, at.settled_at = at.settled_at, -1
        try:
            move(boundary, leaving, reshape)
        finally:
            at.settled_at = settled

    patch.setattr(Boundary, "_move", move_at_once)


def votes_wait_for_no_begin(patch: pytest.MonkeyPatch) -> None:
    """Rule 30 off: the first step may be committed while agents do not know that all ranks have begun."""
    patch.setattr(WorkerProtocol, "await_begin", lambda membership, timeout: None)


def shapes_of_the_record(patch: pytest.MonkeyPatch) -> None:
    """Rule 31 off: a rank is thought to hold its parameters as the record's assignment says."""
    report = Recovery._report

    def as_recorded(recovery: Recovery) -> Report:
        at = recovery._context
        return replace(report(recovery), held_for=at.history.of(at.record).assignment.digest())

    patch.setattr(Recovery, "_report", as_recorded)


@dataclass(frozen=True)
class Rule:
    """``off`` switches it off; some seed of the scenario then ends with ``finding``."""

    number: int
    text: str
    off: Callable[[pytest.MonkeyPatch], None]
    finding: str
    program: cluster.Program = field(default_factory=cluster.Program)
    seeds: int = 40
    may_lose: bool = False
    """More are lost than there are mirrors: a run that says which blocks are lost ends well."""

    def __str__(self) -> str:
        return f"rule {self.number}"


def kill_once_it_has_reported(run: cluster.Cluster) -> None:
    """Rank 2 is lost when all have reported for generation 2, and before a decision is read."""
    run.scheduler.wait(lambda: any(isinstance(e, Reported) and e.entries[0].rank == 2 for e in run.journal.events()))
    next(process for process in run.processes if process.rank == 2).kill()
    run.scheduler.wait(lambda: False)


def hear_late_that_a_rank_begins(run: cluster.Cluster) -> None:
    """The last agent is slow to write down that its rank has begun."""
    agent = run.agents[-1]
    hear = agent._hear

    def hear_late(launched: Launched) -> None:
        match FROM_WORKER.decode(launched.said[0]):
            case Ask(Request.BEGIN):
                run.scheduler.wait(lambda: False, LATE)
        hear(launched)

    agent._hear = hear_late  # type: ignore[method-assign]
    run.scheduler.wait(lambda: False)


RULES = (
    Rule(
        11,
        "dp4 steps=3 back=never evaluate=0 mirrors=3 kill:rank=3,step=2,point=before_vote",
        decisions_pass_unread_entries,
        "no rank can continue",
        cluster.Program(outside=kill_once_it_has_reported),
    ),
    Rule(
        12,
        "dp3 steps=3 back=never evaluate=0 mirrors=2 kill:rank=2,step=2,point=after_vote "
        "kill:rank=1,point=in_recovery_promote",
        reports_stay_valid,
        "is at version 2, the record at 1",
    ),
    Rule(
        15,
        "pp2dp2 steps=3 back=never evaluate=0 kill:rank=1,step=2,point=after_reduce",
        messages_name_no_generation,
        "no rank can continue",
    ),
    Rule(
        16,
        # No other rank has the layers of rank 0, so it is let in in the middle of the step, before the next vote.
        "pp3dp1 steps=4 back=0.02 evaluate=0 kill:rank=0,step=2,point=mid_backward "
        "kill:rank=1,rejoin=1,point=after_reduce",
        copies_of_an_earlier_life_count,
        "has no copy of block",
        seeds=12,
        may_lose=True,
    ),
    Rule(
        18,
        "dp3 steps=3 back=never evaluate=1 kill:rank=2,step=2,point=before_step",
        phases_end_for_each_rank_alone,
        "no end after",
    ),
    Rule(
        29,
        "pp2dp2 steps=4 back=never evaluate=1 heavy=on migrate_after=0 migration=blocking mirrors=3 "
        "kill:rank=2,step=2,point=before_step",
        migrations_begin_before_a_vote,
        "ranks disagree about",
    ),
    Rule(
        30,
        "dp4 steps=2 back=never evaluate=0",
        votes_wait_for_no_begin,
        "a committed step would be forgotten",
        cluster.Program(outside=hear_late_that_a_rank_begins, begins_together=False),
    ),
    Rule(
        31,
        "tp2pp2dp2 steps=9 back=0.03 heavy=on micro_batches=4 mirrors=2 "
        "kill:rank=6,losses=0,point=mid_backward kill:rank=6,rejoin=1,point=in_join",
        shapes_of_the_record,
        "parameters that have not been gathered",
        seeds=12,
    ),
)


def findings(rule: Rule, patch: pytest.MonkeyPatch) -> str:
    """An error that a seed of the rule's scenario ends with: the rule's finding if any is; empty if all end well."""
    patch.setattr(cluster, "Scheduler", lambda seed: Scheduler(seed, TURNS))
    found = ""
    for seed in range(rule.seeds):
        try:
            run = cluster.run(replace(parse(rule.text), seed=seed), rule.program)
            if not (rule.may_lose and any(isinstance(one.error, StateLost) for one in run.processes)):
                check(run)
        except Exception as error:
            found = f"seed {seed}: {error}"
            if rule.finding in found:
                break
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_with_the_rule_every_order_of_events_ends_well(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings(rule, monkeypatch) == ""


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_without_the_rule_some_order_does_not(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    check(cluster.run(replace(parse(rule.text), faults=())))  # the undisturbed run is not made without the rule
    rule.off(monkeypatch)
    found = findings(rule, monkeypatch)
    assert found and rule.finding in found, found
