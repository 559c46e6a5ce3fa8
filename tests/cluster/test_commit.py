"""Which way a step ends that a loss, or a gradient, interrupts (``engine/transaction/commit.py``, ``recover.py``)."""

from __future__ import annotations

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


def test_a_gradient_that_is_not_finite_is_computed_again() -> None:
    cluster = run("steps=3", Program(samples=Broken(5, times=2)))
    check(cluster)
    assert all("not finite" in "".join(process.notices) for process in cluster.finished)


def test_a_gradient_that_stays_so_ends_the_job() -> None:
    with pytest.raises(NotFinite, match="step 2"):
        run("steps=3", Program(samples=Broken(5, times=100)))


def test_an_action_that_fails_on_one_rank_fails_on_all() -> None:
    failed = []

    def save(process: RankProcess, step: int) -> None:
        def body() -> None:
            if process.rank == 2:
                raise OSError("no space left")

        assert process.engine is not None
        try:
            process.engine.fenced(body, together=True)
        except ActionFailed as error:
            failed.append((process.rank, step, str(error)))

    cluster = run("steps=2", Program(fenced=save))
    check(cluster)
    assert sorted(failed) == [(rank, step, "no space left") for rank in range(4) for step in (1, 2)]
