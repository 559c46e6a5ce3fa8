"""Two losses with one mirror: state is lost exactly when the second takes the only copy of some block.

Which copies there are is read from the memory of those who are left, at the instant of the second kill: copies in their
pools, and those that have come whole and verified over a stream. What is on its way then may still come or not; where
that decides, either end is right. Everything else is settled: a copy that is there must be found, and none is made up.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from megatron.elastic.comm.side_channel import BACKGROUND_ROLE
from megatron.elastic.engine.inject import STEP_POINTS
from megatron.elastic.engine.transaction.agreement import StateLost
from megatron.elastic.state.layout import BlockKey
from tests.cluster.checks import check
from tests.cluster.cluster import Cluster, Program, RankProcess
from tests.scenario.scenario import parse

SEED = 20261122
FIRST, STEPS = 1, 4
SOON = ("in_recovery_edit", "in_recovery_promote", "in_recovery_resume", "in_migration_begin", "in_migration_finish")
"""While the others recover from the first loss, or make its copies anew."""


@dataclass
class Held:
    """Copies on the ranks that are left after a kill."""

    every: set[BlockKey] = field(default_factory=set)
    """The blocks of the job."""
    whole: set[BlockKey] = field(default_factory=set)
    under_way: set[BlockKey] = field(default_factory=set)
    """Come in part, or not followed up to the last version."""

    @property
    def must_be_lost(self) -> bool:
        """Some block is nowhere."""
        return bool(self.every - self.whole - self.under_way)

    @property
    def must_be_kept(self) -> bool:
        """A copy of each block is there."""
        return self.every == self.whole


def held_without(dead: RankProcess) -> Held:
    """Return the copies of the others when ``dead`` has just been killed."""
    left = [p for p in dead.cluster.processes if not p.process.dead and p.engine is not None]
    found, engines = Held(), [p.engine for p in left if p.engine is not None]
    newest = max(engine.record.version for engine in engines)
    for process, engine in zip(left, engines, strict=True):
        found.every |= engine.view.placement.copies.keys()
        found.whole |= set(engine.tools.pool)
        streams = engine._migrator._streams
        for receiver in [] if streams is None else [part.receiver for part in streams._incoming]:
            for key, copy in receiver.blocks.items():
                done = key not in receiver._unverified and copy.version == newest
                (found.whole if done else found.under_way).add(key)
            waiting = any(place[1] == BACKGROUND_ROLE and messages for place, messages in process.fabric.inbox.items())
            found.under_way |= found.every if waiting else set()
    return found


def after_two_losses(number: int) -> tuple[Cluster, list[Held], bool]:
    """The ``number``-th pair of kills: who, where, and how many steps apart; and whether state was lost."""
    dice = random.Random(f"{SEED}/{number}")
    first, second = dice.sample(range(4), 2)
    at_once, point = dice.random() < 0.4, dice.choice(STEP_POINTS)
    where = f"point={dice.choice(SOON)}" if at_once else f"point={point},step={FIRST + dice.choice((0, 0, 1, 2))}"
    faults = f"kill:rank={first},step={FIRST},point={dice.choice(STEP_POINTS)} kill:rank={second},{where}"
    left: list[Held] = []
    scenario = parse(f"steps={STEPS} seed={number} back=never {faults}")
    cluster = Cluster(scenario, Program(died=lambda dead: left.append(held_without(dead))))
    cluster.go()
    lost = [process.error for process in cluster.processes if isinstance(process.error, StateLost)]
    if not lost:
        check(cluster)
    return cluster, left, bool(lost)


def compare(pairs: range) -> Counter[str]:
    """Count the endings of pairs of losses, by kind. Raises ``AssertionError`` for one that does not fit the copies."""
    ends: Counter[str] = Counter()
    for number in pairs:
        cluster, left, lost = after_two_losses(number)
        case = f"pair {number} (seed {SEED}): {cluster.scenario}"
        if len(left) < 2:
            ends["one loss"] += 1
            assert not lost, case
            continue
        assert not (lost and left[-1].must_be_kept), f"{case}: lost, though a copy of each block was there"
        assert lost or not left[-1].must_be_lost, f"{case}: went on without {left[-1].every - left[-1].whole}"
        settled = left[-1].must_be_kept or left[-1].must_be_lost
        ends[("lost" if lost else "kept") if settled else "under way"] += 1
    return ends


@pytest.mark.slow
def test_pairs_of_losses() -> None:
    ends = compare(range(50))
    assert ends["lost"] and ends["kept"] > ends["under way"], ends


@pytest.mark.slow
def test_many_pairs_of_losses() -> None:
    ends = compare(range(1000))
    assert ends["lost"] and ends["kept"] > ends["under way"], ends
