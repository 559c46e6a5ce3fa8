"""Several validation sets, read in full, have plain Megatron's losses, also where a rank is lost while one is read.

One of the sets does not divide: Megatron reads on from its begin, so each evaluation begins at another sample.
A rank that joins later has to begin there too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.integration.elastic_job import MODEL, ROOT, JobResult, elastic_job
from tests.integration.test_cpu_layouts import logs
from tests.integration.test_engine_parity import NO_DROPOUT, Case, run_plain
from tests.integration.test_rank_orders import BACK

LENGTHS = {"train": 200, "one": 13, "two": 4}
"""Samples of each data set."""
FULL = ("--full-validation", "--eval-interval", "2", "--global-batch-size", "8", "--calculate-per-token-loss")
ROUNDING = 2e-6


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The model's flags with documents of random tokens instead of mock data, and the two validation sets."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder, dice = tmp_path_factory.mktemp("sets"), np.random.default_rng(7)
    for name, samples in LENGTHS.items():
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.uint16)
        tokens = dice.integers(0, 255, samples * 32 + 1)  # --seq-length 32
        builder.add_document(np.array(tokens, dtype=np.uint16), [len(tokens)])
        builder.finalize(str(folder / f"{name}.idx"))
    drop = MODEL.index("--split")
    model = [flag for flag in (*MODEL[:drop], *MODEL[drop + 2 :]) if flag != "--mock-data"]
    return (*model, "--train-data-path", str(folder / "train"), "--data-cache-path", str(folder / "cache"))


def several(model: Sequence[str]) -> tuple[str, ...]:
    folder = Path(model[model.index("--train-data-path") + 1]).parent
    return (*FULL, "--multiple-validation-sets", "--valid-data-path", str(folder / "one"), str(folder / "two"))


def validation_losses(text: str) -> dict[tuple[int, str], float]:
    """(step, set) → loss, of each evaluation in the loop."""
    found = re.findall(r"validation(\S*) loss at iteration (\d+) \| lm loss value: (\S+)", text)
    losses = {(int(step), name): float(loss) for name, step, loss in found}
    assert len(losses) == len(found), found
    return losses


def killed(folder: Path, model: Sequence[str], flags: Sequence[str], faults: str) -> JobResult:
    injected = ("--elastic-allow-inject", "--elastic-inject", f"{faults};{BACK}")
    job = elastic_job(folder, 4, 1, 2, 5, *flags, *NO_DROPOUT, *injected, model=model)
    assert job.code == 0, job.output[-6000:]
    assert all(record.fields["lost_steps"] == 0 for record in job.of("recovery"))
    return job


@pytest.mark.slow
def test_losses_are_megatrons_and_ranks_may_be_lost_in_any_set(tmp_path: Path, sets: tuple[str, ...]) -> None:
    flags = several(sets)
    run_plain(tmp_path, [Case("plain", (1, 2, 2), flags)], model=sets)
    reference = validation_losses(logs(tmp_path, "plain"))
    assert sorted(reference) == [(2, "-0"), (2, "-1"), (4, "-0"), (4, "-1")]
    assert len(set(reference.values())) == 4
    faults = "kill:rank=2,step=2,point=in_evaluate,nth=5;kill:rank=1,step=4,point=in_evaluate,nth=15"
    job = killed(tmp_path / "killed", sets, flags, faults)
    assert {record.fields["lost_rank"] for record in job.of("loss")} == {1, 2}
    assert re.findall(r"joined by (\d+)", job.output)[0] == "2", "it takes part in the evaluations of step 4"
    assert validation_losses(job.output) == pytest.approx(reference, rel=ROUNDING)


@pytest.mark.slow
def test_one_set_in_full_and_a_test_set(tmp_path: Path, sets: tuple[str, ...]) -> None:
    """Megatron's own iterator over one set ends early, so an undisturbed job is compared with."""
    folder = Path(sets[sets.index("--train-data-path") + 1]).parent
    data = ("--valid-data-path", str(folder / "one"), "--test-data-path", str(folder / "train"), "--eval-iters", "3")
    whole = elastic_job(tmp_path / "whole", 4, 1, 2, 5, *FULL, *data, *NO_DROPOUT, model=sets)
    assert whole.code == 0, whole.output[-6000:]
    job = killed(tmp_path / "killed", sets, (*FULL, *data), "kill:rank=0,step=2,point=in_evaluate,nth=7")
    for pattern in (
        r"loss at iteration \d+ \| lm loss value: (\S+)",
        r"(?:validation|test) set \| lm loss value: (\S+)",
    ):
        reference, found = ([float(loss) for loss in re.findall(pattern, run.output)] for run in (whole, job))
        assert len(reference) == 2 and found == pytest.approx(reference, rel=ROUNDING)


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_without_training_as_by_megatron(tmp_path: Path, sets: tuple[str, ...]) -> None:
    """The job that saved it has evaluated more samples than the set of the second job has."""
    folder, saved = Path(sets[sets.index("--train-data-path") + 1]).parent, str(tmp_path / "saved")
    data = ("--valid-data-path", str(folder / "one"), "--test-data-path", str(folder / "train"))
    flags = (*data, "--global-batch-size", "8", "--eval-interval", "2")
    first = elastic_job(
        tmp_path / "first",
        2,
        1,
        1,
        5,
        *flags,
        "--eval-iters",
        "1",
        "--save",
        saved,
        "--save-interval",
        "5",
        *NO_DROPOUT,
        model=sets,
    )
    assert first.code == 0, first.output[-6000:]
    alone = (*flags, "--eval-iters", "1", "--skip-train", "--load", saved)
    run_plain(tmp_path, [Case("alone", (1, 1, 2), alone)], model=sets)
    job = elastic_job(tmp_path / "elastic", 2, 1, 1, 5, *alone, *NO_DROPOUT, model=sets)
    assert job.code == 0, job.output[-6000:]
    reference, found = (all_losses(text) for text in (logs(tmp_path, "alone"), job.output))
    assert len(reference) == 2 and found == pytest.approx(reference, rel=ROUNDING)


def all_losses(text: str) -> list[float]:
    """Of each evaluation, in the order of the log."""
    return [float(loss) for loss in re.findall(r"validation loss at iteration .*? lm loss value: (\S+)", text)]


@pytest.mark.slow
def test_a_function_for_values_beside_the_loss_is_refused_in_one_line(tmp_path: Path) -> None:
    """Megatron calls it with the model in each evaluation, where ranks have other layers after a loss."""
    script = ROOT / "tests/integration/other_data_training.py"
    job = elastic_job(tmp_path, 2, 1, 1, 2, "--eval-interval", "1", "--eval-iters", "1", script=script, seconds=120)
    assert job.code == 1 and "Traceback" not in job.output, job.output[-4000:]
    (line,) = re.findall(r"^error: (.*)", job.output, re.MULTILINE)
    assert "non_loss_data_func of pretrain()" in line and "leave it out" in line
    assert not job.losses and "values beside the loss" not in job.output
