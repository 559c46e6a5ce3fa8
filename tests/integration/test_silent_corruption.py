"""A bit that flips in memory is noticed, named by block, tensor and rank, and repaired from another copy.

Real jobs in which one bit of one state block is flipped. Contents of every block are
compared in every step here (``--elastic-verify-interval 1``); with a longer interval
blocks take turns.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic_job import JobResult, elastic_job, largest_deviation

STEPS = 10
BATCH = ("--global-batch-size", "12", "--hidden-dropout", "0", "--attention-dropout", "0")


def flipped(folder: Path, world: int, fault: str, *flags: str) -> JobResult:
    inject = ("--elastic-allow-inject", "--elastic-inject", fault)
    return elastic_job(folder, world, 1, 1, STEPS, *BATCH, *inject, *flags)


def findings(result: JobResult) -> set[str]:
    return {text for record in result.of("certificate") for text in record.fields["failures"]}


def check_repaired(reference: Path, folder: Path, world: int, fault: str, rank: int, tensor: str, *flags: str) -> None:
    sound = elastic_job(reference, world, 1, 1, STEPS, *BATCH, *flags)
    result = flipped(folder, world, fault, *flags)
    assert sound.code == 0 and result.code == 0, result.output[-4000:]
    found = findings(result)
    assert len(found) == 1, found
    assert f"{tensor} corrupted at rank {rank}" in found.pop()
    assert not result.of("loss"), "no process ends for it"
    assert any(record.fields["added"] for record in result.of("migration")), "the copy is made anew"
    assert set(result.committed) == set(range(1, STEPS + 1))
    assert largest_deviation(sound.committed, result.committed) < 1e-5


def test_a_damaged_owner_is_convicted_by_the_parameters_and_repaired(tmp_path: Path) -> None:
    """One mirror: what the owner gathered out agrees with the mirror, what it holds does not."""
    fault = "flip:rank=1,step=4,point=after_gather"
    check_repaired(tmp_path / "a", tmp_path / "b", 2, fault, 1, "master", "--elastic-verify-interval", "1")


@pytest.mark.slow
def test_with_one_mirror_a_damaged_mirror_cannot_be_told_from_its_owner(tmp_path: Path) -> None:
    fault = "flip:rank=1,step=4,point=after_gather,copy=mirror"
    result = flipped(tmp_path, 2, fault, "--elastic-verify-interval", "1")
    assert result.code == 5, result.output[-3000:]
    assert any("master corrupted at one of ranks [0, 1]" in text for text in findings(result))
    assert "Traceback" not in result.output


@pytest.mark.slow
@pytest.mark.parametrize("tensor", ["master", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("copy", ["owner", "mirror"])
def test_two_mirrors_settle_any_single_corruption(tmp_path: Path, copy: str, tensor: str) -> None:
    fault = f"flip:rank=1,step=4,point=after_gather,copy={copy},tensor={tensor}"
    flags = ("--elastic-mirrors", "2", "--elastic-verify-interval", "1")
    check_repaired(tmp_path / "a", tmp_path / "b", 3, fault, 1, tensor, *flags)


@pytest.mark.slow
def test_blocks_take_turns_and_a_corruption_is_found_within_the_interval(tmp_path: Path) -> None:
    """Adam's second moment of a mirror: harmless to others until then, so two mirrors settle it later as well."""
    fault = "flip:rank=1,step=2,point=after_gather,copy=mirror,tensor=exp_avg_sq"
    result = flipped(tmp_path, 3, fault, "--elastic-mirrors", "2", "--elastic-verify-interval", "4")
    assert result.code == 0, result.output[-3000:]
    steps = {record.fields["step"] for record in result.of("certificate") if record.fields["failures"]}
    assert len(steps) == 1
    assert 3 <= steps.pop() <= 7
    assert all("corrupted at rank 1" in text for text in findings(result))
