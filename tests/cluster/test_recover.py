"""A rank recovers when communication fails (``engine/transaction/recover.py``), with a loss as the cause or without."""

from __future__ import annotations

import pytest

from megatron.elastic.comm.errors import BadMessage, CommError
from megatron.elastic.comm.vendor.library import VendorError
from megatron.elastic.control.requests import Request
from megatron.elastic.engine.failures import CommunicationFault
from megatron.elastic.engine.transaction.recover import Recovery
from tests.cluster.checks import check
from tests.cluster.cluster import Program, RankProcess, run
from tests.cluster.test_migrate import engine_of


def recovery_of(rank: RankProcess) -> Recovery:
    return engine_of(rank)._recovery


class Failing:
    """A fenced action that fails on rank 2 for the first ``times`` that it is done after each of ``steps``."""

    def __init__(self, times: int, *steps: int, error: CommError | None = None) -> None:
        self._left = dict.fromkeys(steps, times)
        self._error = error or CommError("a link broke")
        self.done: dict[int, list[int]] = {}

    def __call__(self, rank: RankProcess, step: int) -> None:
        engine_of(rank).fenced(lambda: self._body(rank, step))

    def _body(self, rank: RankProcess, step: int) -> None:
        if rank.rank == 2 and self._left.get(step, 0):
            self._left[step] -= 1
            raise self._error
        self.done.setdefault(rank.rank, []).append(step)


REFUSALS = [CommError("a link broke"), VendorError("ncclCommShrink: remote process exited"), BadMessage(1, "nonsense")]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_an_error_that_no_loss_explains_makes_new_groups_and_the_work_goes_on(error: CommError) -> None:
    """The other ranks may not have seen it: a generation with the same members ends their wait."""
    failing = Failing(1, 1, 3, error=error)
    cluster = run("steps=4 seed=2", Program(fenced=failing))
    check(cluster)
    for process in cluster.finished:
        reasons = [outcome.decision.reason for outcome in process.recoveries]
        assert reasons == ["reform", "reform"], "once for each of the two steps"
        assert all(outcome.lost == () and outcome.newcomers == () for outcome in process.recoveries)
        assert sorted(set(failing.done[process.rank])) == [1, 2, 3, 4]


def test_an_error_that_comes_again_with_new_groups_ends_the_job() -> None:
    """At the same step: the network, or a bug, would make groups for ever."""
    with pytest.raises(CommunicationFault, match="step 2 failed twice, the second time in new groups: a link"):
        run("steps=4 seed=2", Program(fenced=Failing(2, 2)))


def test_an_error_that_a_loss_explains_after_all_may_come_again() -> None:
    """As when a vendor's library says before the agent does that a rank is gone."""
    failing = Failing(2, 2, error=VendorError("ncclAllReduce: remote process exited"))
    cluster = run("steps=4 seed=2 back=never kill:rank=3,point=in_recovery_edit", Program(fenced=failing))
    check(cluster, settled=True)
    for process in cluster.finished:
        assert [(outcome.decision.reason, len(outcome.lost)) for outcome in process.recoveries] == [
            ("loss", 1),
            ("reform", 0),
        ]


def test_ranks_that_all_ask_for_a_generation_recover_in_one_without_a_loss() -> None:
    """It begins when every member has asked, though no newcomer waits."""
    over: list[bool] = []

    def ask(rank: RankProcess, step: int) -> None:
        if step == 2:
            before = engine_of(rank).view
            over.append(recovery_of(rank).ask(Request.JOIN))
            after = engine_of(rank).view
            assert after.generation > before.generation and after.configuration == before.configuration

    cluster = run("steps=4 seed=3", Program(fenced=ask))
    check(cluster, settled=True)
    assert len(over) == 4 and len(set(over)) == 1
    for process in cluster.finished:
        (outcome,) = process.recoveries
        assert outcome.lost_steps == 0 and outcome.promoted == () and outcome.failures == {}


@pytest.mark.parametrize("seed", range(3))
def test_losses_one_after_the_other_are_each_told_once(seed: int) -> None:
    """The second falls into the recovery from the first: the generation in which steps go on names both."""
    faults = "kill:rank=0,step=2,point=after_reduce kill:rank=3,point=in_recovery_edit"
    cluster = run(f"steps=4 seed={seed} back=never mirrors=2 {faults}")
    check(cluster, settled=True)
    for process in cluster.finished:
        assert sorted(loss.rank for outcome in process.recoveries for loss in outcome.lost) == [0, 3]
