"""The mechanisms of bugs that other projects reported, put into a running job: each is noticed, in a known step.

``docs/bugs-of-others.md`` lists all cases with their sources; most are those of other tests. Here are the ones that no
other test has (:mod:`tests.integration.others_bugs_training`).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.elastic_job import ROOT, JobResult, elastic_job
from tests.integration.test_saving import complete

SCRIPT = ROOT / "tests" / "integration" / "others_bugs_training.py"
QUIET = ("--hidden-dropout", "0", "--attention-dropout", "0", "--lr-decay-iters", "8")
STEPS, SAVED_AT = 4, 2


def job(folder: Path, bug: str, rank: str, world: int, tensor: int, *flags: str, steps: int = STEPS) -> JobResult:
    environment = {"OTHERS_BUG": bug, "OTHERS_RANK": rank}
    return elastic_job(folder, world, tensor, 1, steps, *QUIET, *flags, script=SCRIPT, environment=environment)


def saving(folder: Path) -> tuple[str, ...]:
    return "--save", str(folder), "--save-interval", str(SAVED_AT), "--exit-interval", str(SAVED_AT)


def loading(folder: Path) -> tuple[str, ...]:
    return "--load", str(folder), "--override-opt-param-scheduler"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("sound")
    made = elastic_job(folder / "events", 2, 1, 1, STEPS, *QUIET, *saving(folder / "saved"))
    assert made.code == 0 and complete(folder / "saved") == [SAVED_AT], made.output[-3000:]
    return folder / "saved"


def refused_at_load(result: JobResult) -> None:
    """The job ended with the finding, and has committed nothing on the loaded state."""
    assert result.code == 5, f"exit code {result.code}\n{result.output[-4000:]}"
    assert "is not the state that was saved" in result.output
    assert not result.committed


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug",
    ["moments_of_another_optimizer", "moments_begin_at_zero"],
)
def test_state_that_a_load_puts_in_a_wrong_place_is_not_trained_on(tmp_path: Path, saved: Path, bug: str) -> None:
    refused_at_load(job(tmp_path, bug, "all", 2, 1, *loading(saved)))


@pytest.mark.slow
def test_a_sound_checkpoint_is_what_was_saved_at_another_layout_too(tmp_path: Path, saved: Path) -> None:
    """Pipeline and data parallelism do not cut the state; tensor parallelism does, and a line says so."""
    other = elastic_job(tmp_path / "pipeline", 2, 1, 2, STEPS, *QUIET, *loading(saved))
    assert other.code == 0 and "is verified" in other.output and "not compared" not in other.output
    cut = elastic_job(tmp_path / "tensor", 2, 2, 1, STEPS, *QUIET, *loading(saved))
    assert cut.code == 0 and cut.output.count("the state is not compared with the saved one") == 1, cut.output[-3000:]


@pytest.mark.slow
def test_a_tensor_that_a_writer_spoils_is_found_by_the_load(tmp_path: Path) -> None:
    """Every file is what its writer wrote."""
    made = job(tmp_path / "first", "tiny_numbers_written", "1", 2, 1, *saving(tmp_path / "saved"))
    assert made.code == 0 and complete(tmp_path / "saved") == [SAVED_AT], made.output[-3000:]
    result = elastic_job(tmp_path / "second", 2, 1, 1, STEPS, *QUIET, *loading(tmp_path / "saved"))
    assert "is verified" in result.output
    refused_at_load(result)


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "tensor"), [("own_shard_taken_for_a_replica", 2), ("share_not_written", 1)])
def test_a_save_without_some_shards_is_no_checkpoint_and_training_goes_on(
    tmp_path: Path, bug: str, tensor: int
) -> None:
    result = job(tmp_path, bug, "1", 2, tensor, *saving(tmp_path / "saved"))
    assert "a checkpoint could not be written" in result.output, result.output[-4000:]
    assert complete(tmp_path / "saved") == []
    assert set(result.committed) >= {1, 2}


def test_a_gradient_that_each_rank_has_a_part_of_ends_the_job_in_the_first_step(tmp_path: Path) -> None:
    result = job(tmp_path, "partial_sums_of_a_norm", "all", 2, 2, "--sequence-parallel")
    assert result.code == 5, result.output[-4000:]
    found = re.findall(r"step 1: gradients of (\S+) \(unit \d+\) differ within a cell", result.output)
    assert {*found} == {"decoder.final_layernorm.weight", "decoder.final_layernorm.bias"}
    assert not result.committed


def test_parameters_that_are_not_trained_are_refused_at_the_start(tmp_path: Path) -> None:
    result = job(tmp_path, "frozen_before_start", "all", 2, 1)
    assert result.code == 1, result.output[-4000:]
    assert "final_layernorm" in result.output and "requires_grad=False" in result.output
    assert "Traceback" not in result.output and not result.committed
