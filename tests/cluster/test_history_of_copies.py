"""Rules of copies (docs/design.md §3.6) switched off in the code that trains: the history checker sees each.

The bounded model has the same mutants (``tests/unit/protocol/test_model_history.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatron.elastic.engine.transaction import agreement
from megatron.elastic.engine.transaction.certify import Certifier
from megatron.elastic.engine.transaction.commit import StepCommit
from megatron.elastic.engine.transaction.migrate import Migrator
from megatron.elastic.state.block_copy import BlockCopy
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.protocol import Holdings, Resolution, resolve
from megatron.elastic.state.record import GradientKey, StepRecord
from tests.cluster import cluster
from tests.cluster.cluster import Program
from tests.cluster.history import judged, rules_of
from tests.cluster.scheduler import Scheduler
from tests.cluster.test_rules import TURNS
from tests.scenario.scenario import parse
from tools.history.verdict import Verdict


def mirrors_are_updated_a_step_late(patch: pytest.MonkeyPatch) -> None:
    """Rule 4 off: a rank votes before its update of the step before is done.

    Checksums that are shipped with gradients tell the engine of it, so they are off too.
    """

    def update(commit: StepCommit) -> None:
        at = commit._context
        pool, before = at.tools.pool, at.tools.pool.records.get(at.record.version - 1)
        if before is not None:
            pool.apply(before, [key for key in pool if pool.get(key).version < before.version])
        late = at.record.version > 1  # the certificate of the start compares copies
        pool.apply(at.record, [block.key for block in at.view.owned] if late else tuple(pool))

    patch.setattr(StepCommit, "update", update)
    patch.setattr(Certifier, "dispute", lambda certifier, disputes: None)


def gradients_have_no_generation(patch: pytest.MonkeyPatch) -> None:
    """Rule 5 off: gradients of an earlier generation stay, and the first of a step is the one that counts."""

    def slot(pool: StatePool, key: BlockKey, gradient: GradientKey) -> BlockCopy:
        return pool.get(key)

    def first(copy: BlockCopy, record: StepRecord) -> GradientKey | None:
        return min((key for key in copy.gradients if key.step == record.version - 1), default=None)

    patch.setattr(StatePool, "discard", lambda pool, keep, step: None)
    patch.setattr(StatePool, "_slot_for", slot)
    patch.setattr(StatePool, "_leading_to", staticmethod(first))


def no_vote_is_taken_again(patch: pytest.MonkeyPatch) -> None:
    """Rule 8 off: the newest record that a survivor has is the last word."""

    def newest(*asked: object) -> Resolution:
        found = resolve(*asked)  # type: ignore[arg-type]
        if found.kind != "revote" or found.record is None:
            return found
        return Resolution("rerun", found.record.version, None, found.record)

    patch.setattr(agreement, "resolve", newest)


def only_named_copies_count(patch: pytest.MonkeyPatch) -> None:
    """A copy that was made anew counts for nothing until a vote has named it."""
    holdings = StatePool.holdings

    def named(pool: StatePool, *asked: object) -> Holdings:
        return replace(holdings(pool, *asked), offered=())  # type: ignore[arg-type]

    patch.setattr(StatePool, "holdings", named)


def copies_are_named_by_the_vote_after(patch: pytest.MonkeyPatch) -> None:
    """Missing copies are named by the second vote after a loss, however soon they are there."""
    all_say = Migrator._all_say

    def never(migrator: Migrator, coming: bool) -> bool:
        all_say(migrator, coming)
        return False

    patch.setattr(Migrator, "_all_say", never)


@dataclass(frozen=True)
class Rule:
    """``off`` switches it off; some seed of the scenario then leaves a history that shows ``finding``."""

    finding: str
    text: str
    off: Callable[[pytest.MonkeyPatch], None]
    seeds: int = 12

    def __str__(self) -> str:
        return self.off.__name__


CALM = "back=never evaluate=0 verify_interval=0"
RULES = (
    Rule("updated in time", f"dp2 steps=3 {CALM}", mirrors_are_updated_a_step_late),
    Rule(
        "one gradient",
        f"dp3 steps=3 {CALM} kill:rank=2,step=2,point=after_ship",
        gradients_have_no_generation,
    ),
    Rule(
        "vote taken again",
        f"pp3dp1 steps=3 {CALM} kill:rank=0,step=2,point=after_vote",
        no_vote_is_taken_again,
    ),
    Rule(
        "every copy counts",
        f"dp4 steps=4 {CALM} kill:rank=0,step=1,point=after_vote kill:rank=1,step=2,point=after_ship",
        only_named_copies_count,
        40,
    ),
    Rule(
        "copies named in time",
        f"dp3 steps=3 {CALM} kill:rank=2,step=1,point=before_vote",
        copies_are_named_by_the_vote_after,
    ),
)


def verdicts(rule: Rule, folder: Path, patch: pytest.MonkeyPatch) -> list[Verdict]:
    """Judge the logs of the scenario in each order of events, up to the first that shows the rule's finding."""
    patch.setattr(cluster, "Scheduler", lambda seed: Scheduler(seed, TURNS))
    found = []
    for seed in range(rule.seeds):
        here, scenario = folder / str(seed), replace(parse(rule.text), seed=seed)
        with suppress(Exception):  # without a rule a run may end anyhow; what it has logged by then counts
            cluster.run(scenario, Program(events=here))
        found.append(judged(here, rules_of(scenario)))
        if any(one.rule == rule.finding for one in found[-1].violations):
            break
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_with_a_rule_no_history_shows_it(rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [one for verdict in verdicts(rule, tmp_path, monkeypatch) for one in verdict.violations]
    assert not found, found


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_without_a_rule_some_history_shows_it(rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule.off(monkeypatch)
    *_, last = verdicts(rule, tmp_path, monkeypatch)
    assert any(one.rule == rule.finding for one in last.violations), [str(one) for one in last.violations]
