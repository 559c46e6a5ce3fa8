"""Layers move to other workers after a loss, and back when it returns: same losses, every sample once.

Real jobs under the launcher, real SIGKILLs, dropout 0.1, compared step by step with an undisturbed run.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.elastic_job import JobResult, elastic_job, largest_deviation

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
STEPS = 8
DENSE_STAGE = (
    *("--num-experts", "4", "--moe-layer-freq", "[0]*2+[1]*2", "--moe-aux-loss-coeff", "0.01"),
    *("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid", "--disable-bias-linear"),
)
"""Of two stages one has no experts."""


def job(folder: Path, world: int, tensor: int, pipeline: int, *flags: str, steps: int = STEPS) -> JobResult:
    result = elastic_job(folder, world, tensor, pipeline, steps, *DROPOUT, "--lr-decay-iters", str(STEPS), *flags)
    assert result.code == 0, result.output[-6000:]
    return result


def killed(
    folder: Path, world: int, tensor: int, pipeline: int, rank: int, *flags: str, steps: int = STEPS
) -> JobResult:
    script = f"kill:rank={rank},step=3,point=mid_forward"
    result = job(
        folder, world, tensor, pipeline, "--elastic-allow-inject", "--elastic-inject", script, *flags, steps=steps
    )
    assert set(result.committed) == set(range(1, steps + 1)), "every step is committed"
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))
    return result


def cuts(result: JobResult) -> list[tuple[tuple[tuple[int, int, int], ...], ...]]:
    """Pipelines of every plan in order: (cell, first unit, end unit) of each segment, by replica."""
    found = []
    for record in result.of("plan"):
        replicas: dict[int, list[tuple[int, int, int]]] = {}
        for replica, cell, first, end in record.fields["stages"]:
            replicas.setdefault(replica, []).append((cell, first, end))
        found.append(tuple(tuple(replicas[number]) for number in sorted(replicas)))
    return found


def same_run(reference: JobResult, other: JobResult) -> None:
    """Losses to 1e-5; samples and their ledger exactly."""
    assert largest_deviation(reference.committed, other.committed) < 1e-5
    ledgers = {r.fields["step"]: r.fields["ledger"] for r in other.of("step")}
    assert {r.fields["step"]: r.fields["ledger"] for r in reference.of("step")}.items() <= ledgers.items()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "tensor", "pipeline", "rank"),
    [
        (4, 1, 2, 3),
        (4, 1, 2, 0),
        (8, 2, 2, 6),
        (8, 1, 4, 5),
    ],
)
def test_a_damaged_replica_is_cut_anew(tmp_path: Path, world: int, tensor: int, pipeline: int, rank: int) -> None:
    reference = job(tmp_path / "whole", world, tensor, pipeline)
    result = killed(tmp_path / "killed", world, tensor, pipeline, rank, "--no-elastic-respawn")
    same_run(reference, result)
    assert "layers (embedding and head count) move to other ranks" in result.output
    assert result.output.count(f"lost rank {rank} ") == 1, "a loss is told once, by the launcher"
    assert re.search(rf"recovered at generation \d+ without .*{rank}\b", result.output), "its place with the recovery"
    before, after = cuts(result)[0], cuts(result)[-1]
    assert before != after
    units = max(end for replica in after for _, _, end in replica)
    for replica in after:
        assert [first for _, first, _ in replica] == [0, *(end for _, _, end in replica)][:-1]
        assert replica[-1][2] == units, "each pipeline left is whole"


@pytest.mark.slow
def test_a_checkpoint_saved_with_layers_elsewhere_is_the_launchs(tmp_path: Path) -> None:
    """Saved while one replica is a single stage; resumed by other workers, losses go on as undisturbed."""
    reference = job(tmp_path / "whole", 4, 1, 2)
    saved = str(tmp_path / "saved")
    flags = ("--no-elastic-respawn", "--save", saved, "--save-interval", "6", "--exit-interval", "6")
    script = ("--elastic-allow-inject", "--elastic-inject", "kill:rank=3,step=2,point=mid_forward")
    cut = job(tmp_path / "killed", 4, 1, 2, *script, *flags)
    assert any(len(replica) == 1 for plan in cuts(cut) for replica in plan), "nothing had moved when it was saved"
    resumed = job(tmp_path / "resumed", 2, 1, 2, "--load", saved, "--override-opt-param-scheduler")
    later = {step: loss for step, loss in reference.committed.items() if step > 6}
    assert set(resumed.committed) == set(later)
    assert largest_deviation(later, resumed.committed) < 1e-5


@pytest.mark.slow
def test_the_launchs_pipelines_return_with_the_lost_rank(tmp_path: Path) -> None:
    """Layers move after two steps without the lost rank, and back when it is there again."""
    steps = 60
    reference = job(tmp_path / "whole", 4, 1, 2)
    result = killed(tmp_path / "killed", 4, 1, 2, 2, "--elastic-migrate-after", "2", steps=steps)
    same_run(reference, result)
    seen = cuts(result)
    launch = ((0, 0, 3), (1, 3, 6)), ((2, 0, 3), (3, 3, 6))
    assert any(len(replica) == 1 for cut in seen for replica in cut), f"no pipeline was cut anew: {seen}"
    assert seen[-1] == launch, f"not the launch's pipelines in the end: {seen}"


@pytest.mark.slow
@pytest.mark.parametrize("model", [(), DENSE_STAGE], ids=["alike", "experts in the lost stage alone"])
def test_a_lost_stage_is_taken_over_from_mirrors_and_checkpoints_stay_the_launchs(
    tmp_path: Path, model: tuple[str, ...]
) -> None:
    """Nobody else held its layers, and nobody is started again; what is saved then has both stages."""
    reference = job(tmp_path / "whole", 2, 1, 2, *model)
    saved = str(tmp_path / "saved")
    flags = ("--no-elastic-respawn", "--save", saved, "--save-interval", "6", "--exit-interval", "6")
    script = ("--elastic-allow-inject", "--elastic-inject", "kill:rank=1,step=4,point=mid_forward")
    alone = job(tmp_path / "killed", 2, 1, 2, *script, *flags, *model)
    assert cuts(alone)[-1] == (((0, 0, 6),),), "one worker computes the whole model"
    first = {step: loss for step, loss in reference.committed.items() if step <= 6}
    assert largest_deviation(first, alone.committed) < 1e-5
    resumed = job(tmp_path / "resumed", 2, 1, 2, "--load", saved, "--override-opt-param-scheduler", *model)
    later = {step: loss for step, loss in reference.committed.items() if step > 6}
    assert set(resumed.committed) == set(later)
    assert largest_deviation(later, resumed.committed) < 1e-5
