"""A rank's migrations, one after the other (``engine/transaction/migrate.py``): begun, named by a vote, or given up."""

from __future__ import annotations

import pytest

from megatron.elastic.engine.compute.message_memory import BufferPool, GradientMessage
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.transaction.migrate import Migrator
from tests.cluster.checks import check
from tests.cluster.cluster import Cluster, Program, RankProcess, run

BEGUN = 2
"""The step after which the ranks begin a migration by themselves."""
LEAVING = (3,)


def engine_of(rank: RankProcess) -> Engine:
    assert rank.engine is not None
    return rank.engine


def migrator_of(rank: RankProcess) -> Migrator:
    return engine_of(rank)._migrator


def move_away(rank: RankProcess, step: int) -> None:
    """After step :data:`BEGUN`, all ranks move the copies of rank 3 to others."""
    engine = engine_of(rank)
    if step == BEGUN:
        begun = engine.views.migration(engine.view, leaving=LEAVING)
        assert migrator_of(rank).begin(begun)


def copies_on(rank: RankProcess, where: int) -> int:
    return sum(where in copies.ranks for copies in engine_of(rank).view.placement.copies.values())


def test_a_migration_is_named_by_a_vote_at_which_all_ranks_hold_its_copies() -> None:
    """Before it the old copies count, after it the new ones, on every rank in the same step."""
    seen: dict[int, set[tuple[bool, int]]] = {}

    def fenced(rank: RankProcess, step: int) -> None:
        move_away(rank, step)
        seen.setdefault(step, set()).add((migrator_of(rank).under_way, copies_on(rank, 3)))

    cluster = run("steps=7 seed=1", Program(fenced=fenced))
    check(cluster)
    assert all(len(states) == 1 for states in seen.values()), f"ranks differ: {seen}"
    states = [seen[step].pop() for step in sorted(seen)]
    before = states[0][1]
    assert states[:BEGUN] == [(False, before), (True, before)]
    ended = next(number for number, (under_way, _) in enumerate(states) if number >= BEGUN and not under_way)
    assert states[BEGUN:ended] == [(True, before)] * (ended - BEGUN)
    assert states[ended:] == [(False, 0)] * (len(states) - ended), "nothing is left there, and nothing comes back"
    received = {process.rank: engine_of(process).state_bytes for process in cluster.finished}
    assert received[3] == 0 and sum(received.values()) > 0


def test_the_messages_to_a_targets_copies_take_the_memory_that_was_prepared_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step whose vote ends a migration sends other messages than the steps before it, all of them prepared."""
    prepared: list[GradientMessage] = []
    taken: list[GradientMessage] = []
    prepare, take = BufferPool.prepare, BufferPool.take

    def prepares(buffers: BufferPool) -> None:
        prepare(buffers)
        prepared.append(buffers.free[-1])

    def takes(buffers: BufferPool) -> GradientMessage:
        taken.append(take(buffers))
        return taken[-1]

    monkeypatch.setattr(BufferPool, "prepare", prepares)
    monkeypatch.setattr(BufferPool, "take", takes)
    check(run("steps=7 seed=1", Program(fenced=move_away)))
    assert prepared, "some rank sends reduced blocks"
    assert set(map(id, prepared)) <= set(map(id, taken)), "the step that names the target takes all of them"


def test_one_migration_at_a_time_and_none_without_changes() -> None:
    def fenced(rank: RankProcess, step: int) -> None:
        engine, migrator = engine_of(rank), migrator_of(rank)
        nothing = engine.views.migration(engine.view)
        if step == 1:
            assert not nothing.changes and not migrator.begin(nothing) and not migrator.under_way
            assert not migrator.replenish() and not migrator.ready(1e9), "no copy is missing"
            migrator.forget()
        move_away(rank, step)
        if step == BEGUN:
            with pytest.raises(RuntimeError, match="a migration is under way"):
                migrator.begin(nothing)
            assert migrator.heading == engine.view.configuration, "no vote names the target before it is concluded"

    check(run("steps=6 seed=2", Program(fenced=fenced)))


def given_up(keep: bool, seed: int) -> Cluster:
    """All ranks begin a migration and give it up when its copies have arrived, between the same steps."""

    def fenced(rank: RankProcess, step: int) -> None:
        engine, migrator = engine_of(rank), migrator_of(rank)
        move_away(rank, step)
        if step == BEGUN:
            before, held = engine.view.configuration, set(engine.tools.pool)
            migrator.proceed()
            engine.fenced(lambda: rank.threads.sleep(1.0))
            migrator.forget(keep)
            migrator.forget(keep)
            assert not migrator.under_way and engine.view.configuration == before
            assert held <= set(engine.tools.pool), "each copy that was there is there still"
            assert keep or held == set(engine.tools.pool)

    return run(f"steps=6 seed={seed} evaluate=0", Program(fenced=fenced))


@pytest.mark.parametrize("keep", [True, False])
def test_a_migration_that_is_given_up_leaves_the_configuration_and_every_old_copy(keep: bool) -> None:
    cluster = given_up(keep, seed=3)
    check(cluster)
    assert all(copies_on(process, 3) for process in cluster.finished), "rank 3 is where it was"


@pytest.mark.parametrize("point", ["after_reduce", "before_vote", "after_vote"])
def test_copies_are_made_anew_within_the_recovery_and_named_by_the_next_votes(point: str) -> None:
    """The first migration after a loss only adds; it begins before the step is computed again."""
    urgent: list[bool] = []
    begin = Migrator.begin

    def noted(self: Migrator, migration: object) -> bool:
        begun = begin(self, migration)  # type: ignore[arg-type]
        if begun:
            urgent.append(migration.urgent)  # type: ignore[attr-defined]
        return begun

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Migrator, "begin", noted)
        cluster = run(f"steps=6 seed=4 back=never kill:rank=1,step=2,point={point}")
    check(cluster, settled=True)
    assert urgent[:3] == [True, True, True] and set(urgent[3:]) <= {False}
