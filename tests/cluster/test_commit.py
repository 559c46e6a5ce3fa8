"""Which way a step ends that a loss, or a gradient, interrupts (``engine/transaction/commit.py``, ``recover.py``)."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megatron.elastic.engine.failures import ActionFailed, NotFinite
from tests.cluster.checks import check
from tests.cluster.cluster import Program, RankProcess, run
from tests.cluster.model import Samples


class Broken(Samples):
    """Sample ``number`` is not a number for the first ``times`` that it is read; both ends of a pipeline read it."""

    def __init__(self, number: int, times: int) -> None:
        self._number, self._left = number, times

    def __getitem__(self, number: int) -> torch.Tensor:
        item = super().__getitem__(number)
        if number == self._number and self._left:
            self._left -= 1
            item = torch.full_like(item, float("nan"))
        return item


def test_a_step_ends_in_each_way() -> None:
    """After a loss around the vote the others finish the step, vote again, or compute again, by what they know."""
    kinds = set()
    for seed in range(4):
        for point in ("before_vote", "after_vote"):
            cluster = run(f"steps=2 seed={seed} back=never kill:rank={seed},step=2,point={point}")
            check(cluster)
            kinds |= {outcome.resolution.kind for process in cluster.finished for outcome in process.recoveries}
    assert kinds == {"roll_forward", "revote", "rerun"}


class Sparse(Samples):
    """Some numbers of each input are zero, more from sample 4 on: so are gradients of the first unit's weights."""

    def __getitem__(self, number: int) -> torch.Tensor:
        item = super().__getitem__(number)
        item[0, :, : 3 if number < 4 else 5] = 0
        return item


def test_a_step_has_the_zeros_of_its_whole_gradient_in_each_way() -> None:
    program = Program(samples=Sparse())
    calm = {step: result.zeros for step, result in run("steps=3", program).finished[0].results.items()}
    assert calm[1] != calm[2]
    kinds = set()
    for seed, point in product(range(5), ("before_vote", "after_vote")):
        cluster = run(f"steps=3 seed={seed} back=never kill:rank={seed % 2},step=2,point={point}", program)
        for process in cluster.finished:
            assert {step: result.zeros for step, result in process.results.items()} == calm, cluster.scenario
            kinds |= {outcome.resolution.kind for outcome in process.recoveries}
    assert kinds == {"roll_forward", "revote", "rerun"}


def test_losses_that_layers_add_are_those_of_all_ranks() -> None:
    """No survivor knows the part of a lost rank, so the step is computed again where a vote could be repeated."""
    program = Program(layer_losses=True)
    calm = {step: result.losses["of layers"] for step, result in run("steps=2", program).finished[0].results.items()}
    assert set(calm.values()) == {1.5}, "the mean of four layers"
    for seed in range(4):
        cluster = run(f"steps=2 seed={seed} back=never kill:rank=1,step=2,point=before_vote", program)
        for process in cluster.finished:
            assert {step: result.losses["of layers"] for step, result in process.results.items()} == calm
            assert [outcome.resolution.kind for outcome in process.recoveries] == ["rerun"]


def test_a_gradient_that_is_not_finite_is_computed_again() -> None:
    cluster = run("steps=3", Program(samples=Broken(5, times=2)))
    check(cluster)
    assert all("not finite" in "".join(process.notices) for process in cluster.finished)


def test_a_gradient_that_stays_so_ends_the_job() -> None:
    with pytest.raises(NotFinite, match="step 2"):
        run("steps=3", Program(samples=Broken(5, times=100)))


def fails_on_rank_2(failed: list[tuple[int, int, str]]) -> Program:
    """After each step an action that one rank cannot do; ``failed`` receives what each rank is told of it."""

    def fenced(process: RankProcess, step: int) -> None:
        def body() -> None:
            if process.rank == 2:
                raise OSError("no space left")

        assert process.engine is not None
        try:
            process.engine.fenced(body, together=True)
        except ActionFailed as error:
            failed.append((process.rank, step, str(error)))

    return Program(fenced=fenced)


def test_an_action_that_fails_on_one_rank_fails_on_all() -> None:
    failed: list[tuple[int, int, str]] = []
    check(run("steps=2", fails_on_rank_2(failed)))
    assert sorted(failed) == [(rank, step, "no space left") for rank in range(4) for step in (1, 2)]


@pytest.mark.parametrize("point", ["in_recovery_promote", "in_recovery_resume"])
def test_it_fails_on_those_too_that_a_loss_keeps_from_the_end_of_that_recovery(point: str) -> None:
    """Some ranks have gone on then, others have not. If the rank that failed is lost before, the action is repeated."""
    for seed in range(8):
        for lost in (0, 2):
            failed: list[tuple[int, int, str]] = []
            scenario = f"steps=2 seed={seed} mirrors=2 back=never kill:rank={lost},step=1,point={point}"
            check(run(scenario, fails_on_rank_2(failed)))
            told = {rank for rank, step, _ in failed if step == 1} - {lost}
            assert told in ({rank for rank in range(4) if rank != lost}, set()), f"{scenario}: {failed}"
            assert told or lost == 2, scenario
