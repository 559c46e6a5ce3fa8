"""Collectives that a device has only enqueued: a rank reports none of them as done (:meth:`Fabric.unfinished`).

The call has returned, and the rank has gone on. An interruption then ends the operation without its values, and no call
tells of it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import EditReport
from megatron.elastic.engine.compute.executor import Executor, Pass, PassResult
from megatron.elastic.engine.transaction import fence, phases
from megatron.elastic.engine.transaction.phases import StepBody
from tests.cluster import cluster as clusters
from tests.cluster.checks import check
from tests.cluster.cluster import run
from tests.cluster.fabric import ClusterFabric, Style
from tests.cluster.test_overlap import BEHIND

STEP = 2
"""The step in which a link of rank 2 breaks."""


@pytest.fixture(autouse=True)
def enqueues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "Style", lambda **drawn: Style(**{**drawn, "enqueues": True}))


class Breaks:
    """Raises :class:`CommError` once, on rank 2 in step :data:`STEP`: no rank is lost, and new groups are made."""

    def __init__(self) -> None:
        self.done = False

    def __call__(self, rank: int, step: int) -> None:
        if (rank, step, self.done) == (2, STEP, False):
            self.done = True
            raise CommError("a link broke")


@pytest.mark.parametrize("layout", ["dp4", "pp2dp2"])
def test_parameters_whose_gather_was_cut_off_are_gathered_again(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of rank 2 has not come to it when a link breaks; for the host of each rank the gather is over.

    No rank is lost and no unit moves, so nothing else would have the ranks gather again.
    """
    breaks, begin, reach = Breaks(), ClusterFabric.begin_all_gather_blocks, clusters._Injector.reach
    updated: dict[int, int] = {}
    began: set[int] = set()

    def begun(fabric: ClusterFabric, group: Any, flat: torch.Tensor, blocks: Any) -> dist.Work:
        if updated.get(fabric.rank) == STEP:
            began.add(fabric.rank)
            if fabric.rank == 2 and not breaks.done:
                return fabric.never(flat, group)
        return begin(fabric, group, flat, blocks)

    def broken(injector: Any, point: str, step: int) -> None:
        if point == "after_update":
            updated[injector._of] = step
        if (injector._of, point, updated.get(2)) == (2, "after_gather", STEP) and not breaks.done:
            injector._cluster.scheduler.wait(lambda: began == set(range(4)))
            breaks(2, STEP)
        reach(injector, point, step)

    monkeypatch.setattr(ClusterFabric, "begin_all_gather_blocks", begun)
    monkeypatch.setattr(clusters._Injector, "reach", broken)
    cluster = run(f"{layout} steps=4 seed=2 evaluate=0")
    check(cluster)
    assert breaks.done and all(len(process.recoveries) == 1 for process in cluster.finished)


@pytest.mark.parametrize("cut_off", [(), (1,)])
def test_a_vote_is_not_taken_again_over_what_a_rank_had_only_enqueued(
    cut_off: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part of a sum may have been computed from values that never came. So the step is run again."""
    breaks, vote = Breaks(), StepBody.vote

    def broken(body: StepBody, *given: Any) -> Any:
        breaks(body._view.rank, max(body._tools.pool.records) + 1)
        return vote(body, *given)

    monkeypatch.setattr(StepBody, "vote", broken)
    monkeypatch.setattr(ClusterFabric, "unfinished", lambda fabric: fabric.rank in cut_off)
    cluster = run("dp4 steps=4 seed=2")
    check(cluster)
    kinds = Counter(outcome.resolution.kind for process in cluster.finished for outcome in process.recoveries)
    assert kinds == {"rerun" if cut_off else "revote": 4}


@pytest.mark.parametrize("training", [True, False], ids=["step", "evaluation"])
@pytest.mark.parametrize("believed", [False, True], ids=["with the rule", "without"])
def test_an_error_of_what_a_cut_off_collective_left_ends_no_rank(
    believed: bool, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link of rank 2 breaks. Rank 1 waits in a collective of the model, then reads a size that was never written."""
    fabrics, failed, edit, run_pass = dict[int, ClusterFabric](), set[int](), ClusterFabric.edit, Executor.run

    def edited(fabric: ClusterFabric, *given: Any) -> EditReport:
        fabrics[fabric.rank] = fabric
        return edit(fabric, *given)

    def passed(executor: Executor, work: Pass) -> PassResult:
        rank = executor._cell.ranks[executor._position]
        if work.training == training and rank in (1, 2) and rank not in failed:
            failed.add(rank)
            if rank == 2:
                raise CommError("a link broke")
            fabric = fabrics[rank]
            fabric.scheduler.wait(lambda: fabric._frozen > fabric.generation)
            fabric.never(torch.zeros(1))
            raise ValueError("a tensor of -1 elements")
        return run_pass(executor, work)

    monkeypatch.setattr(ClusterFabric, "edit", edited)
    monkeypatch.setattr(Executor, "run", passed)
    if believed:
        for module in (phases, fence):
            monkeypatch.setattr(module, "as_interruption", lambda fabric: nullcontext())
        with pytest.raises(ValueError, match="a tensor of -1 elements"):
            check(run("dp4 steps=4 seed=2 back=never evaluate=1"))
    else:
        cluster = run("dp4 steps=4 seed=2 evaluate=1")
        check(cluster)
        assert failed == {1, 2} and all(len(process.recoveries) == 1 for process in cluster.finished)


@pytest.mark.parametrize(
    ("overlap", "point"),
    [(how, at) for how in ("", BEHIND) for at in ("mid_reduce", "after_reduce", "after_vote", "mid_gather")]
    + [(BEHIND, "mid_overlap_reduce"), (BEHIND, "mid_overlap_gather")],
)
@pytest.mark.parametrize("rank", range(4))
def test_a_kill_while_collectives_are_enqueued(overlap: str, point: str, rank: int) -> None:
    check(run(f"steps=3 seed={rank} back=never {overlap} kill:rank={rank},step=2,point={point}"), settled=True)
