"""Each event of the engine reaches the listener of every living rank, and the engine needs none of them."""

from __future__ import annotations

import gc
from collections import defaultdict
from dataclasses import dataclass, field

from megatron.elastic.engine.generation.repartition import Recut
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.transaction.agreement import RecoveryOutcome
from megatron.elastic.engine.transaction.certificates import CertificateOutcome
from megatron.elastic.engine.transaction.listener import Listener, Stepped
from megatron.elastic.engine.transaction.protection import Protected
from megatron.elastic.engine.transaction.streams import Moved
from megatron.elastic.state.record import StepRecord
from tests.cluster.checks import check
from tests.cluster.cluster import Program, RankProcess, run
from tests.cluster.test_migrate import engine_of
from tests.cluster.test_migration import LOSS, MOVING

STEPS = 8


@dataclass
class Heard(Listener):
    """Notes each event with the version at which it came."""

    events: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    collects: dict[str, bool] = field(default_factory=dict)
    """Event → True if Python searched for garbage when it came first."""
    steps: list[Stepped] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def stepped(self, record: StepRecord, view: View, step: Stepped) -> None:
        self.events["stepped"].append(record.version)
        self.steps.append(step)

    def settled(self, outcome: RecoveryOutcome, view: View, seconds: float) -> None:
        assert outcome.resolution.record is not None and outcome.decision.generation == view.generation
        self.events["settled"].append(view.generation)
        self.collects.setdefault("settled", gc.isenabled())

    def noticed(self, why: str) -> None:
        self.lines.append(why)

    def recut(self, record: StepRecord, view: View, recut: Recut) -> None:
        assert recut.target != view.assignment, "called before units move"
        self.events["recut"].append(record.version)
        self.collects.setdefault("recut", gc.isenabled())

    def moved(self, record: StepRecord, view: View, moved: Moved) -> None:
        assert moved.migration.target == view.configuration, "called when the target is in force"
        assert set(moved.seconds) == {"finish", "switch", "certificate"}
        self.events["moved"].append(record.version)

    def protected(self, record: StepRecord, view: View, protected: Protected) -> None:
        self.events["protected"].append(record.version)

    def examined(self, view: View, verdict: CertificateOutcome) -> None:
        self.events[f"examined: {verdict.transition}"].append(verdict.step)


def test_every_living_rank_hears_of_every_event_at_the_same_version() -> None:
    """A loss, copies made anew, layers that move: from the second step on, when the listeners are in place."""
    heard: dict[int, Heard] = {}

    def listen(rank: RankProcess, step: int) -> None:
        if step == 1:
            heard[rank.rank] = Heard()
            engine_of(rank).context.listener = heard[rank.rank]

    cluster = run(f"{MOVING} seed=1 back=never {LOSS}", Program(fenced=listen))
    check(cluster, settled=True)
    survivors = [heard[process.rank] for process in cluster.finished]
    first = survivors[0].events
    assert all(one.events == first for one in survivors), [dict(one.events) for one in survivors]
    assert first["stepped"] == list(range(2, STEPS + 1)) and first["settled"] == [2]
    assert len(first["recut"]) == 1 and first["protected"] and len(first["moved"]) >= 2
    assert first["examined: migration"] == first["moved"] and first["examined: recovery"]
    for one in survivors:
        assert [step.address.first for step in one.steps] == [step.address.first for step in survivors[0].steps]
        assert all(step.computed == step.address.size and step.seconds > 0 for step in one.steps)
        assert [step.attempts for step in one.steps] == [2] + [1] * (STEPS - 2), "the loss made it compute again"
        assert one.steps[-1].state_bytes >= one.steps[0].state_bytes


def test_python_searches_for_no_garbage_while_a_rank_recovers_or_plans_anew() -> None:
    """Ranks are threads of one process here, so the first that is through lets all of them search again."""
    one = Heard()

    def listen(rank: RankProcess, step: int) -> None:
        if step == 1:
            engine_of(rank).context.listener = one

    run(f"{MOVING} seed=1 back=never {LOSS}", Program(fenced=listen))
    assert one.collects == {"settled": False, "recut": False} and gc.isenabled()


def test_a_refusal_is_noticed_on_the_ranks_that_it_concerns_once() -> None:
    heard: dict[int, Heard] = {}

    def listen(rank: RankProcess, step: int) -> None:
        if step == 1:
            heard[rank.rank] = Heard()
            engine_of(rank).context.listener = heard[rank.rank]

    run(f"steps={STEPS} seed=1 migrate_after=-1 drain:rank=0|1,step=2", Program(fenced=listen))
    for one in heard.values():
        assert len(one.lines) == 1 and "ranks 0, 1 cannot leave" in one.lines[0]


def test_the_engine_needs_no_listener() -> None:
    """One that ignores everything changes no result."""

    def ignore(rank: RankProcess, step: int) -> None:
        engine_of(rank).context.listener = Listener()

    check(run(f"{MOVING} seed=1 {LOSS}", Program(fenced=ignore)))
