"""A member that cannot compute waits for ranks to return: it asks for what lets them in, and not without end."""

from __future__ import annotations

import pytest

from megatron.elastic.comm.address import Address
from megatron.elastic.control.membership import WAITING_FOR_RANKS, Activity, Decision
from megatron.elastic.control.messages import FROM_WORKER, Ask, Freeze, Hello, PendingChanged, ToWorker
from megatron.elastic.control.requests import Pending, Request
from megatron.elastic.control.timing import Timing
from megatron.elastic.control.wire import encode
from megatron.elastic.engine.generation.factory import StageGone
from megatron.elastic.engine.transaction.wait_for_ranks import await_ranks
from megatron.elastic.plan.dataflow import PlanError
from tests.cluster.control import ClusterMembership, Launched
from tests.cluster.scheduler import ClusterThreads, Process, Scheduler

DETECTION = 0.01
PATIENCE = Timing.derive(DETECTION).hang_unknown
GENERATION = 3
SOON, LATER = 0.1 * PATIENCE, 0.5 * PATIENCE


class Wait:
    """One wait of rank 0 for ranks 2 and 3; ``messages``: (when, message of the agent)."""

    def __init__(
        self, messages: list[tuple[float, ToWorker]], returning: tuple[int, ...] = (2,), respawn: bool = True
    ) -> None:
        self.lines: list[str] = []
        self.activities: list[Activity] = []
        self.asked: list[Ask] = []
        self.error: PlanError | None = None
        self.seconds = 0.0
        self._scheduler, self._messages, self._respawn = Scheduler(0), messages, respawn
        process = Process("rank 0")
        self._threads = ClusterThreads(self._scheduler, process)
        self._launched = Launched.of(0, 0, process)
        self._membership = ClusterMembership(self._launched, 4, "host0", False, self._threads, self.activities.append)
        where = {rank: Address(rank, 0, f"host{rank}") for rank in (0, 1)}
        self._gone = StageGone(Decision(GENERATION, where, "loss", returning=returning), [2, 3], [2, 3])
        self._over = False
        for name, body in (("trains", self._wait), ("agent", self._talk)):
            self._scheduler.spawn(process, name, body)
        self._scheduler.over = lambda: self._over
        self._scheduler.run()
        said = [FROM_WORKER.decode(text) for text in self._launched.said]
        self.asked = [message for message in said if isinstance(message, Ask)]
        assert all(isinstance(message, Ask | Hello) for message in said)

    def _wait(self) -> None:
        self._membership.start(lambda generation: None)
        self._launched.told.append(encode(Freeze(GENERATION)))
        began = self._threads.monotonic()
        try:
            await_ranks(self._membership, self._gone, 7, self._respawn, DETECTION, self.lines.append, self._threads)
        except PlanError as error:
            self.error = error
        self.seconds = self._threads.monotonic() - began
        self._over = True

    def _talk(self) -> None:
        for when, message in self._messages:
            self._threads.sleep(when - self._threads.monotonic())
            self._launched.told.append(encode(message))


def test_the_wait_ends_with_the_next_generation() -> None:
    wait = Wait([(SOON, Freeze(GENERATION + 1))])
    assert wait.error is None and SOON <= wait.seconds < LATER
    assert wait.asked == [], "no newcomer waits for admission"
    assert set(wait.activities) == {Activity(7, WAITING_FOR_RANKS, (2, 3))}, "so the launcher knows for whom"
    assert len(wait.lines) == 1 and "ranks [2, 3] are gone" in wait.lines[0]


@pytest.mark.parametrize(
    ("pending", "requests"),
    [
        (Pending(join=True), [Request.JOIN]),
        (Pending(reform=True), [Request.REFORM]),
        (Pending(join=True, reform=True), [Request.JOIN, Request.REFORM]),
        (Pending(checkpoint=True, leave=(1,)), []),
    ],
)
def test_newcomers_are_asked_for_once_and_a_decision_on_who_returns_too(
    pending: Pending, requests: list[Request]
) -> None:
    wait = Wait([(SOON, PendingChanged(pending)), (LATER, Freeze(GENERATION + 1))])
    assert wait.error is None
    assert [ask.what for ask in wait.asked] == requests


def test_a_request_to_drain_does_not_end_the_wait_and_is_told_once() -> None:
    """Without these ranks no complete state can be saved."""
    wait = Wait([(SOON, PendingChanged(Pending(drain=True))), (LATER, Freeze(GENERATION + 1))])
    assert wait.error is None and wait.seconds >= LATER
    assert sum("cannot save before ranks [2, 3] are back" in line for line in wait.lines) == 1


def test_the_wait_has_a_limit_that_the_error_names_with_the_flag_that_sets_it() -> None:
    wait = Wait([(SOON, PendingChanged(Pending(join=True)))])
    assert PATIENCE <= wait.seconds < 1.1 * PATIENCE
    assert f"did not come back within {PATIENCE:.0f} s (--elastic-detection-timeout" in str(wait.error)
    assert "resume from the last checkpoint (--load)" in str(wait.error)


def test_ranks_that_are_not_started_again_are_not_waited_for() -> None:
    wait = Wait([], respawn=False)
    assert wait.seconds == 0.0 and "--no-elastic-respawn" in str(wait.error)


@pytest.mark.parametrize(("returning", "hint"), [((2,), False), ((), True), ((1,), True)])
def test_the_user_is_told_what_to_do_if_no_missing_rank_is_being_started(
    returning: tuple[int, ...], hint: bool
) -> None:
    wait = Wait([(SOON, Freeze(GENERATION + 1))], returning)
    assert ("use ctl admit" in wait.lines[0]) == hint
