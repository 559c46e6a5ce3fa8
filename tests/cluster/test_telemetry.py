"""The event logs of all ranks together tell a run; each line on the console comes from one rank."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.elastic.observe.event_kinds import (
    CertificateEvent,
    GenerationEvent,
    MigrationEvent,
    PhasesEvent,
    PlanEvent,
    ProtectionEvent,
    RankLostEvent,
    RecoveryEvent,
    SlowRankEvent,
    StepEvent,
    TraceEvent,
)
from megatron.elastic.observe.events import EventRecord, read_events
from megatron.elastic.runtime.telemetry import batch_lines, rows_of
from tests.cluster.checks import check
from tests.cluster.cluster import Cluster, Program, RankProcess, run
from tests.cluster.test_migrate import engine_of
from tests.cluster.test_migration import LOSS, MOVING
from tests.cluster.test_rebalance import let_votes_measure

STEPS = 7


def logged(
    scenario: str, folder: Path, fenced: Callable[[RankProcess, int], None] = lambda rank, step: None
) -> tuple[Cluster, list[EventRecord]]:
    """A run and what its ranks have logged."""
    cluster = run(scenario, Program(fenced=fenced, events=folder))
    check(cluster)
    return cluster, read_events(folder)


def of(records: list[EventRecord], kind: type) -> list[EventRecord]:
    return [record for record in records if isinstance(record.event, kind)]


def by_rank(records: list[EventRecord], kind: type) -> Counter[int]:
    return Counter(record.rank for record in of(records, kind))


@pytest.mark.parametrize("point", ["mid_forward", "before_vote", "after_vote", "mid_gather", "after_step"])
def test_every_step_is_logged_though_the_rank_that_logs_steps_is_lost(point: str, tmp_path: Path) -> None:
    """The others hold each step's event, and the next lowest rank writes it if the lowest one is lost."""
    cluster, records = logged(f"steps=5 seed=1 back=never kill:rank=0,step=3,point={point}", tmp_path)
    steps: dict[int, set[str]] = {}
    for record in of(records, StepEvent):
        event = record.event
        assert isinstance(event, StepEvent) and record.rank in (0, 1), "the lowest rank, or the next one"
        steps.setdefault(event.step, set()).add(repr((event.samples, event.losses, event.grad_norm, event.ledger)))
        assert event.losses == pytest.approx(cluster.finished[0].results[event.step].losses, rel=1e-5)
    assert sorted(steps) == [1, 2, 3, 4, 5] and all(len(told) == 1 for told in steps.values())
    assert {rank: count for rank, count in by_rank(records, PhasesEvent).items() if rank} == {1: 5, 2: 5, 3: 5}


def test_a_loss_is_told_by_every_survivor_and_said_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, records = logged(f"{MOVING} seed=1 back=never {LOSS}", tmp_path)
    assert by_rank(records, GenerationEvent) == by_rank(records, RankLostEvent) == by_rank(records, RecoveryEvent)
    assert by_rank(records, GenerationEvent) == {0: 1, 2: 1, 3: 1}
    for record in of(records, RankLostEvent):
        event = record.event
        assert isinstance(event, RankLostEvent)
        assert (event.lost_rank, event.host, event.cause, event.step) == (1, "host1", "signal SIGKILL", 2)
        assert (event.replica, event.stage, event.tensor_parallel_group) == (1, 0, (1,))
    for record in of(records, RecoveryEvent):
        event = record.event
        assert isinstance(event, RecoveryEvent) and event.outcome == "re-run" and event.lost_steps == 0
        assert list(event.seconds) == ["decide", "edit", "plan", "settle"] and min(event.seconds.values()) >= 0
    assert {record.rank for record in of(records, PlanEvent)} == {0}
    said = capsys.readouterr().out.splitlines()
    assert sum("move to other ranks" in line for line in said) == 1
    assert sum("without rank 1" in line for line in said) == 1
    assert sum("mirrors complete with step" in line for line in said) == 1


def documented(event: type, field: str) -> list[str]:
    """The values in quotes in the docstring of a field of ``event``."""
    (defined,) = ast.parse(textwrap.dedent(inspect.getsource(event))).body
    assert isinstance(defined, ast.ClassDef)
    for one, docstring in pairwise(defined.body):
        if isinstance(one, ast.AnnAssign) and ast.unparse(one.target) == field:
            return re.findall(r"'([^']+)'", ast.unparse(docstring).strip('"'))
    raise AssertionError(f"{event.__name__} has no field {field}")


CHANGES = (
    "kill:rank=1,step=2,point=mid_forward",
    "kill:rank=1,step=2,point=before_vote",
    "kill:rank=1,step=2,point=after_vote",
    "evaluate=1 kill:rank=1,step=2,point=in_evaluate",
    "steps=9 drain:rank=1,step=2",
    "back=0.02 steps=9 kill:rank=1,step=2,point=after_reduce",
)
JOINED = re.compile(r"(joined by \d+(, \d+)*(?:, )?)?(.*)")
NEVER_IN_A_CLUSTER = {"checkpoint", "reform", "rolled forward"}
"""There is no checkpoint and no broken link, and no rank is a whole step behind."""


@pytest.mark.slow
def test_reasons_outcomes_and_phases_are_those_that_the_docstrings_name(tmp_path: Path) -> None:
    reasons, outcomes, phases = set[str](), set[str](), set[tuple[str, ...]]()
    for number, text in enumerate(CHANGES):
        for seed in range(4):
            settings = text if "back=" in text else f"back=never {text}"
            _, records = logged(f"seed={seed} {settings}", tmp_path / f"{number}-{seed}")
            for record in records:
                if isinstance(record.event, GenerationEvent):
                    reasons.add(record.event.reason)
                elif isinstance(record.event, RecoveryEvent):
                    joined, _, others = JOINED.fullmatch(record.event.outcome).groups("")  # type: ignore[union-attr]
                    outcomes |= {"joined by 2, 3" if joined else "", others} - {""}
                    phases.add(tuple(record.event.seconds))
    assert reasons == {*documented(GenerationEvent, "reason")} - NEVER_IN_A_CLUSTER
    assert outcomes == {*documented(RecoveryEvent, "outcome")} - NEVER_IN_A_CLUSTER
    assert phases == {tuple(documented(RecoveryEvent, "seconds")[:-1])}


def test_copies_and_layers_that_moved_are_told_by_every_rank(tmp_path: Path) -> None:
    cluster, records = logged(f"{MOVING} seed=1 back=never {LOSS}", tmp_path)
    moved = of(records, MigrationEvent)
    assert {record.rank for record in moved} == {0, 2, 3}
    urgent = {record.event.urgent for record in moved if isinstance(record.event, MigrationEvent)}
    assert urgent == {True, False}, "first the copies that the loss left missing, then the layers"
    received: Counter[int] = Counter()
    for record in moved:
        event = record.event
        assert isinstance(event, MigrationEvent) and set(event.seconds) == {"finish", "switch", "certificate"}
        assert event.stall_seconds == sum(event.seconds.values())
        assert not event.urgent or (event.added and not event.promoted and not event.dropped)
        received[record.rank] += event.bytes_received
    assert received == {process.rank: engine_of(process).state_bytes for process in cluster.finished}
    assert by_rank(records, ProtectionEvent) == {0: 1, 2: 1, 3: 1}
    certificates = [record.event for record in of(records, CertificateEvent)]
    kinds = {event.transition for event in certificates if isinstance(event, CertificateEvent) and event.passed}
    assert kinds >= {"start", "recovery", "migration"}


def test_a_newcomer_joins_the_log_of_its_rank(tmp_path: Path) -> None:
    _, records = logged("steps=8 seed=2 back=0.02 kill:rank=2,step=1,point=after_reduce", tmp_path)
    joined = [r.event for r in of(records, GenerationEvent) if isinstance(r.event, GenerationEvent) and r.event.joined]
    assert joined and {event.joined for event in joined} == {(2,)} and {event.reason for event in joined} == {"join"}
    outcomes = {r.event.outcome for r in of(records, RecoveryEvent) if isinstance(r.event, RecoveryEvent)}
    assert "joined by 2" in outcomes
    assert {record.incarnation for record in records if record.rank == 2} == {0, 1}
    assert any(record.kind == "ready" and record.incarnation == 1 for record in records)


def test_a_changed_plan_names_the_slow_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fenced(rank: RankProcess, step: int) -> None:
        if step == 2:
            let_votes_measure(rank, 3.0, STEPS)

    _, records = logged(f"pp2dp3 steps={STEPS} seed=1", tmp_path, fenced)
    slow = [r.event for r in of(records, SlowRankEvent) if isinstance(r.event, SlowRankEvent)]
    assert [(event.slow_rank, round(event.speed_ppm, -4)) for event in slow] == [(3, 330_000)], "told by one rank"
    said = capsys.readouterr().out
    assert "rank 3 runs at 33% of its peers' speed; samples a step: " in said and said.count("runs at") == 1
    plans = [r.event for r in of(records, PlanEvent) if isinstance(r.event, PlanEvent)]
    assert plans[-1].step == slow[0].step + 1 and plans[-1].rows.get("1", 0) < 2


def test_a_batch_that_shrinks_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault = "kill:rank=3,step=2,point=after_reduce"
    cluster = run(f"steps=4 back=never policy=torchft {fault}", Program(events=tmp_path))
    for process in cluster.finished:
        plan = engine_of(process).view.plan
        assert rows_of(plan) == {0: 2, 1: 2}, "the cells of the whole replica"
        (line,) = batch_lines(plan)
        assert line == "policy torchft: the batch shrinks to 2 of 4 samples; the others are left out"
    assert capsys.readouterr().out.count("the batch shrinks") == 1
    computed = {r.event.step: r.event.computed for r in read_events(tmp_path) if isinstance(r.event, StepEvent)}
    assert computed == {1: 4, 2: 2, 3: 2, 4: 2}


def test_a_trace_has_the_work_of_every_rank(tmp_path: Path) -> None:
    _, records = logged(f"steps=3 trace=on event_log={tmp_path}", tmp_path)
    assert by_rank(records, TraceEvent) == dict.fromkeys(range(4), 3)
    for record in of(records, TraceEvent):
        assert isinstance(record.event, TraceEvent)
        assert {op for op, *_ in record.event.work} == {"F", "B"}, "forwards and backwards of its pieces"
