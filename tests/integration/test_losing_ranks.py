"""A rank dies at any named point of a step: the same step is committed, with the same samples, by those who are left.

Each case is a real job under the launcher with a real SIGKILL, dropout 0.1, fp32,
compared with an undisturbed run step by step. The quick cases take one rank per
phase of the transaction; the full walk (every point × every rank) is marked slow.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.elastic.engine.inject import STEP_POINTS
from tests.integration.elastic_job import JobResult, elastic_job, largest_deviation

STEPS = 5
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
LAYOUTS = {"pp2dp2": (1, 2), "tp2dp2": (2, 1)}
QUICK = [
    ("pp2dp2", "mid_backward", 0),
    ("pp2dp2", "after_vote", 3),
    ("tp2dp2", "after_ship", 3),
]
WALK = [(layout, point, rank) for layout in LAYOUTS for point in STEP_POINTS for rank in range(4)]


def job(folder: Path, layout: str, *flags: str, comm: str = "elastic") -> JobResult:
    tensor, pipeline = LAYOUTS[layout]
    result = elastic_job(folder, 4, tensor, pipeline, STEPS, *DROPOUT, *flags, comm=comm)
    assert result.code == 0, result.output[-6000:]
    return result


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobResult]:
    return {layout: job(tmp_path_factory.mktemp(layout), layout) for layout in LAYOUTS}


def check_kill(
    folder: Path, undisturbed: dict[str, JobResult], layout: str, point: str, rank: int, comm: str = "elastic"
) -> None:
    fault = f"kill:rank={rank},step=3,point={point}"
    flags = ("--no-elastic-respawn", "--elastic-allow-inject", "--elastic-inject", fault)
    killed = job(folder, layout, *flags, comm=comm)
    reference = undisturbed[layout]
    lost = [record.fields["lost_rank"] for record in killed.of("loss")]
    assert set(lost) == {rank}, f"lost {lost}, the script kills {rank}"
    assert set(killed.committed) == set(range(1, STEPS + 1)), "every step is committed"
    assert largest_deviation(reference.committed, killed.committed) < 1e-5
    assert all(record.fields["lost_steps"] == 0 for record in killed.of("recovery"))
    samples = {record.fields["step"]: tuple(record.fields["samples"]) for record in killed.of("step")}
    ledgers = {record.fields["step"]: record.fields["ledger"] for record in killed.of("step")}
    assert samples == {step: (16 * (step - 1), 16 * step) for step in range(1, STEPS + 1)}
    assert ledgers == {r.fields["step"]: r.fields["ledger"] for r in reference.of("step")}, "each sample once"


@pytest.mark.parametrize(("layout", "point", "rank"), QUICK)
def test_a_killed_rank_costs_no_step(
    tmp_path: Path, undisturbed: dict[str, JobResult], layout: str, point: str, rank: int
) -> None:
    check_kill(tmp_path, undisturbed, layout, point, rank)


def test_the_gloo_baseline_survives_as_well(tmp_path: Path, undisturbed: dict[str, JobResult]) -> None:
    check_kill(tmp_path, undisturbed, "pp2dp2", "mid_forward", 1, comm="gloo")


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "point", "rank"), WALK)
def test_every_point_of_every_rank(
    tmp_path: Path, undisturbed: dict[str, JobResult], layout: str, point: str, rank: int
) -> None:
    check_kill(tmp_path, undisturbed, layout, point, rank)


def test_losses_one_after_the_other_and_their_return(tmp_path: Path, undisturbed: dict[str, JobResult]) -> None:
    """Two ranks of different stages die; each comes back, is admitted, and the losses stay the same."""
    script = "kill:rank=1,step=2,point=mid_forward;kill:rank=2,step=3,point=after_reduce"
    result = elastic_job(
        tmp_path, 4, 1, 2, 40, *DROPOUT, "--lr-decay-iters", "5", "--elastic-allow-inject", "--elastic-inject", script
    )
    assert result.code == 0, result.output[-6000:]
    assert {record.fields["lost_rank"] for record in result.of("loss")} == {1, 2}
    assert largest_deviation(undisturbed["pp2dp2"].committed, result.committed) < 1e-5
    joined = {rank for record in result.of("generation") for rank in record.fields["joined"]}
    assert joined == {1, 2}, "both ranks came back"
    assert set(result.committed) == set(range(1, 41))


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
