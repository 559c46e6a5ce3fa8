"""A rank dies at any named point of a step: the same step is committed, with the same samples, by those who are left.

Real jobs under the launcher with real SIGKILLs, dropout 0.1, fp32, compared with an
undisturbed run step by step. One job goes through many losses, each when the rank
before is back (:mod:`kill_walk`): quick ones through a few, the slow walk through
every named point of every rank of four layouts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.elastic.engine.inject import KILL_POINTS
from tests.integration.elastic_job import elastic_job, largest_deviation
from tests.integration.kill_walk import DROPOUT, LAYOUTS, PHASES, TWO, Case, cases_of, walk

STEPS = 5
WALK = [(layout, point) for layout in LAYOUTS for point in KILL_POINTS]


def one(layout: str, point: str, rank: int) -> Case:
    """The case of ``rank`` killed at ``point``."""
    return next(case for case in cases_of(LAYOUTS[layout], point) if case.name.startswith(f"{point} of rank {rank}"))


def test_many_losses_and_returns_in_one_job_cost_no_step(tmp_path: Path) -> None:
    """In each phase of the transaction, between steps, while a rank is let in, and a second one during recovery."""
    points = [("mid_backward", 0), ("after_vote", 3), ("after_gather", 0), ("between_steps", 2), ("in_join", 1)]
    cases = [one("pp2dp2", *case) for case in (*points, ("in_recovery_edit", 3))]
    walk(tmp_path, LAYOUTS["pp2dp2"], cases, *TWO)


def test_losses_of_one_rank_of_a_tensor_parallel_group_cost_no_step(tmp_path: Path) -> None:
    """Its partner is parked; in the last case it is lost as well, in the recovery from the first loss."""
    cases = [one("tp2dp2", *case) for case in (("after_ship", 3), ("mid_update", 0), ("in_recovery_decide", 1))]
    walk(tmp_path, LAYOUTS["tp2dp2"], cases, *TWO)


def test_the_gloo_baseline_survives_as_well(tmp_path: Path) -> None:
    cases = [one("pp2dp2", "mid_forward", 1), one("pp2dp2", "after_reduce", 2)]
    walk(tmp_path, LAYOUTS["pp2dp2"], cases, "--elastic-comm", "gloo")


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "point"), WALK)
def test_every_point_of_every_rank(tmp_path: Path, layout: str, point: str) -> None:
    save = ("--save", str(tmp_path / "saved"))
    two = TWO if point.startswith(("in_recovery", "in_movement")) else ()
    flags = {"in_evaluate": PHASES, "in_save": (*PHASES, *save)}.get(point, two)
    walk(tmp_path, LAYOUTS[layout], cases_of(LAYOUTS[layout], point), *flags, seconds=600.0)


def test_when_no_copy_is_left_the_job_says_what_is_lost(tmp_path: Path) -> None:
    """Both ranks of the last stage die at once: exit code 4 and one line, no traceback."""
    script = "kill:rank=2|3,step=3,point=mid_forward"
    result = elastic_job(
        tmp_path, 4, 1, 2, STEPS, "--no-elastic-respawn", "--elastic-allow-inject", "--elastic-inject", script
    )
    assert result.code == 4, result.output[-3000:]
    assert "have no surviving copy" in result.output
    assert "Traceback" not in result.output


def test_a_loss_in_evaluation_and_in_saving_repeats_the_phase(tmp_path: Path) -> None:
    """Validation losses are those of an undisturbed run, and the checkpoint saved by the survivors is resumed."""
    flags = (*DROPOUT, "--eval-interval", "2", "--eval-iters", "2", "--save-interval", "4", "--log-params-norm",
             "--exit-duration-in-mins", "60", "--lr-decay-iters", "8")  # fmt: skip
    whole = elastic_job(tmp_path / "whole", 4, 1, 2, 6, *flags)
    script = "kill:rank=2,step=2,point=in_evaluate;kill:rank=1,step=4,point=in_save"
    saved = str(tmp_path / "saved")
    kills = ("--no-elastic-respawn", "--elastic-allow-inject", "--elastic-inject", script, "--save", saved)
    killed = elastic_job(tmp_path / "killed", 4, 1, 2, 4, *flags, *kills)
    assert whole.code == 0, whole.output[-4000:]
    assert killed.code == 0, killed.output[-4000:]
    assert len(killed.of("loss")) > 0
    assert killed.validation == {step: loss for step, loss in whole.validation.items() if step <= 4}
    resumed = elastic_job(tmp_path / "resumed", 2, 1, 2, 6, *flags, "--load", saved, "--override-opt-param-scheduler")
    assert resumed.code == 0, resumed.output[-4000:]
    later = {step: loss for step, loss in whole.committed.items() if step > 4}
    assert set(resumed.committed) == set(later)
    assert largest_deviation(later, resumed.committed) < 1e-5
