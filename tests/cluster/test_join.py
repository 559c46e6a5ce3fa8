"""A lost rank comes back as a newcomer: at a boundary, within the step where it is needed, with losses around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.elastic.engine.transaction import certify
from megatron.elastic.engine.transaction.agreement import Agreement
from megatron.elastic.engine.transaction.certificates import statement
from megatron.elastic.engine.transaction.context import Context
from megatron.elastic.state.certificate import CertificateError, Statement
from tests.cluster.checks import check
from tests.cluster.cluster import Cluster, Program, RankProcess, run
from tests.cluster.fabric import ClusterFabric
from tests.cluster.test_migrate import engine_of
from tests.scenario.scenario import parse

SOON = "back=0.02"
"""Some hundreds of turns."""


def lives(cluster: Cluster, rank: int) -> list[int]:
    """Incarnations of ``rank`` that came to the end."""
    return [process.incarnation for process in cluster.finished if process.rank == rank]


def everybody_is_back(cluster: Cluster) -> bool:
    """Return whether all ranks of the launch finish, each with state of its own."""
    return all(
        process.engine is not None and len(process.engine.view.living) == 4 and process.engine.view.owned
        for process in cluster.finished
    )


@pytest.mark.parametrize("rank", range(4))
def test_at_a_boundary(rank: int) -> None:
    """Its copies come back to it, and its share of the work."""
    cluster = run(f"steps=12 seed={rank} {SOON} kill:rank={rank},step=1,point=after_reduce")
    assert lives(cluster, rank) == [1]
    check(cluster, settled=True)
    assert everybody_is_back(cluster)


def computes_before(cluster: Cluster, newcomer: int) -> bool:
    """Return whether a member was computing the first step with ``newcomer`` when that one came to take part."""
    passed = [(at.rank, at.point) for at in cluster.passed]
    admitted = max(number for number, (_, point) in enumerate(passed) if point == "in_recovery_promote")
    came = passed.index((newcomer, "in_join"))
    return any(rank != newcomer and point == "mid_forward" for rank, point in passed[admitted:came])


def test_members_compute_while_the_newcomer_takes_over_their_context() -> None:
    """They have the parameters that it lacks, and examine the certificate before they vote."""
    clusters = [run(f"steps=8 seed={seed} back=0.02 kill:rank=1,step=1,point=after_reduce") for seed in range(8)]
    for cluster in clusters:
        assert lives(cluster, 1) == [1]
        check(cluster)
    assert any(computes_before(cluster, 1) for cluster in clusters)


def test_what_a_newcomer_says_is_examined_before_the_first_vote_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(parse(f"steps=12 seed=3 {SOON} kill:rank=1,step=1,point=after_reduce"))

    def with_another_seed(*given: Any) -> Statement:
        mine = statement(*given)
        returned = mine.rank == 1 and any(process.incarnation for process in cluster.processes)
        return replace(mine, random_key=(8, mine.random_key[1])) if returned else mine

    monkeypatch.setattr(certify, "statement", with_another_seed)
    with pytest.raises(CertificateError, match="random"):
        cluster.go()
    newcomer = next(process for process in cluster.processes if process.incarnation)
    assert newcomer.engine is not None and not newcomer.results
    admitted = newcomer.engine.context.settled_at
    assert all(process.engine.record.version == admitted for process in cluster.processes[2:] if process.engine)


def test_within_the_step_that_waits_for_it() -> None:
    """Both ranks of a stage are lost: a newcomer is let in where the members stand, and computes the same step."""
    cluster = run(f"steps=6 seed=4 {SOON} mirrors=2 kill:rank=2|3,step=2,point=before_reduce")
    assert lives(cluster, 2) == [1] and lives(cluster, 3) == [1]
    first_steps = {min(process.results) for process in cluster.finished if process.incarnation}
    assert min(first_steps) == 2, "a newcomer's first step is the one that the others could not finish"
    check(cluster)


GATHERING = ("after_prepare", "mid_forward", "before_step")
"""Points of a newcomer's first step at which a member is in the gather for it."""


def norms_of_parameters(text: str) -> dict[int, float]:
    """Run a scenario; return step → norm of all parameters behind it."""
    norms: dict[int, float] = {}

    def note(rank: RankProcess, step: int) -> None:
        norms[step] = engine_of(rank).parameter_norm()

    check(run(text, Program(fenced=note)))
    return norms


@pytest.mark.parametrize("point", GATHERING)
def test_a_gather_for_a_newcomer_that_is_cut_off_may_write_anything_until_the_edit(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread copies out of a peer's memory, which holds a later message then: members gather all parameters again."""
    cut_off: dict[int, list[torch.Tensor]] = {}
    written: list[int] = []
    abandon, decided = Context.abandon_gather, Agreement._decided

    def abandoned(context: Context) -> None:
        gather, parameters = context.gathering, context.tools.arena.parameters
        if gather is not None and gather._for_others:
            begun = {id(work): (bucket, work) for of_unit in gather._under_way.values() for bucket, work in of_unit}
            late = [bucket for bucket, work in begun.values() if not work.is_success()]
            cut_off[id(context.agreement)] = [parameters[bucket.start : bucket.stop] for bucket in late]
        abandon(context)

    def spoilt(agreement: Agreement, *about: Any) -> Any:
        outcome = decided(agreement, *about)
        for values in cut_off.pop(id(agreement), ()):
            values += 0.5
            written.append(values.numel())
        return outcome

    shared = "steps=8 seed=5 back=0.01 heavy=off mirrors=2 migrate_after=1"
    undisturbed = norms_of_parameters(shared)
    monkeypatch.setattr(Context, "abandon_gather", abandoned)
    monkeypatch.setattr(Agreement, "_decided", spoilt)
    faults = f"kill:rank=3,point=after_ship,step=2,incarnation=0 kill:rank=3,point={point},incarnation=1"
    norms = norms_of_parameters(f"{shared} {faults}")
    assert sum(written) > 0
    assert norms == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.parametrize("point", ["in_join", "mid_forward", "before_vote", "mid_gather"])
def test_the_newcomer_is_killed_as_well(point: str) -> None:
    """In its admission, or in its first step: the third life stays."""
    faults = f"kill:rank=1,step=1,point=mid_forward kill:rank=1,incarnation=1,point={point}"
    cluster = run(f"steps=12 seed=7 {SOON} {faults}")
    check(cluster)
    assert lives(cluster, 1) == [2]


@pytest.mark.parametrize("point", ["in_join", "mid_gather"])
def test_the_newcomer_is_killed_as_well_where_members_gather_with_it(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over gloo and on devices. They had the parameters, and have them no more until a gather is over."""
    monkeypatch.setattr(ClusterFabric, "writes_values_only", lambda fabric: False)
    test_the_newcomer_is_killed_as_well(point)


@pytest.mark.parametrize("point", ["in_recovery_decide", "in_recovery_promote", "before_vote", "mid_update"])
def test_a_member_is_killed_while_another_is_let_in(point: str) -> None:
    faults = f"kill:rank=0,step=1,point=after_step kill:rank=3,rejoin=1,point={point}"
    cluster = run(f"steps=9 seed=5 {SOON} mirrors=2 {faults}")
    assert [p.rank for p in cluster.processes if p.process.dead and p.norm is None][:2] == [0, 3]
    check(cluster)


def test_who_comes_late_runs_through_what_is_over() -> None:
    """It is told the results of evaluations that the members have done since the step it begins with."""
    cluster = run(f"steps=5 seed=2 {SOON} mirrors=2 kill:rank=2|3,step=2,point=in_evaluate")
    check(cluster)
    for process in cluster.finished:
        assert set(process.evaluations) >= {4}
