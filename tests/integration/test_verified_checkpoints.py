"""A checkpoint carries the hash of every file and the record of its state; one that was harmed is not loaded.

The newest that verifies is, and the losses from there on are those of the run that wrote it (dropout 0).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from megatron.elastic.state.manifest import MANIFEST, damage, files_below, read
from megatron.elastic.state.record import StepRecord
from tests.integration.elastic_job import MODEL, JobResult, elastic_job, largest_deviation
from tests.integration.test_cpu_layouts import logs, losses, run_jobs
from tests.integration.test_saving import QUIET, ROUNDING, complete

STEPS, EVERY = 6, 2


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, JobResult]:
    """A folder with checkpoints of steps 2, 4 and 6, and the job that wrote it."""
    folder = tmp_path_factory.mktemp("written")
    saving = ("--save", str(folder / "saved"), "--save-interval", str(EVERY))
    job = elastic_job(folder / "events", 2, 1, 1, STEPS, *QUIET, *saving)
    assert job.code == 0 and complete(folder / "saved") == [2, 4, 6], job.output[-4000:]
    return folder / "saved", job


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, 100)


def harmed(saved: Path, folder: Path, harm: Mapping[str, Callable[[Path], None]]) -> Path:
    """A copy of ``saved`` in which files (names below the folder, with ``*``) were harmed."""
    shutil.copytree(saved, folder)
    for pattern, way in harm.items():
        way(sorted(folder.glob(pattern))[0])
    return folder


def resumed(events: Path, load: Path, *flags: str) -> JobResult:
    loading = ("--load", str(load), "--override-opt-param-scheduler")
    return elastic_job(events, 2, 1, 1, STEPS + 2, *QUIET, *loading, *flags)


def said(job: JobResult, load: Path) -> list[str]:
    """The lines about the checkpoints in ``load``."""
    return [line.split(": ", 1)[1] for line in job.output.splitlines() if line.startswith(f"--load {load}: ")]


def error_of(job: JobResult) -> str:
    """The one line of a job that was refused."""
    errors = [line for line in job.output.splitlines() if line.startswith("error: ")]
    assert job.code == 1 and len(errors) == 1 and "Traceback" not in job.output, job.output[-3000:]
    return errors[0]


@pytest.mark.slow
def test_the_newest_checkpoint_that_verifies_is_loaded_and_each_other_is_named(
    tmp_path: Path, written: tuple[Path, JobResult]
) -> None:
    saved, before = written
    for step in (2, 4, 6):
        checkpoint = saved / f"iter_{step:07d}"
        manifest = read(checkpoint)
        assert manifest is not None and damage(checkpoint, manifest.files) == []
        assert sorted(manifest.files) == files_below(checkpoint), "all files, what Megatron adds at last included"
        record = StepRecord.from_json(manifest.record)
        assert (record.version, manifest.generation) == (step, 1)
        assert manifest.certificate in {proof.fields["digest"] for proof in before.of("certificate")}
    load = harmed(saved, tmp_path / "harmed", {"iter_0000006/__0_0.distcp": flip, "iter_0000004/.metadata": cut})
    later = resumed(tmp_path / "events", load)
    assert later.code == 0, later.output[-4000:]
    lines = said(later, load)
    assert lines[0] == "iter_0000006 is skipped: __0_0.distcp is not what was written"
    assert lines[1].startswith("iter_0000004 is skipped: .metadata has 100 bytes, ")
    assert len(lines) == 3 and lines[2].startswith("iter_0000002 is verified")
    assert min(later.committed) == 3 and max(later.committed) == STEPS + 2
    known = {step: loss for step, loss in before.committed.items() if step > 2}
    assert largest_deviation(known, later.committed) < ROUNDING


@pytest.mark.slow
def test_where_none_verifies_nothing_is_trained(tmp_path: Path, written: tuple[Path, JobResult]) -> None:
    everywhere = {f"iter_{step:07d}/*.distcp": flip for step in (2, 4, 6)}
    load = harmed(written[0], tmp_path / "harmed", everywhere)
    job = resumed(tmp_path / "events", load)
    assert len(said(job, load)) == 3 and not job.committed
    assert f"error: --load {load}: no checkpoint there can be loaded (iter_0000006: __0_0.distcp" in error_of(job)
    # What was asked for by its step is not replaced by another one.
    one = harmed(written[0], tmp_path / "one", {"iter_0000004/*.distcp": flip})
    job = resumed(tmp_path / "asked", one, "--ckpt-step", "4")
    assert "iter_0000004: __0_0.distcp is not what was written" in error_of(job) and "--ckpt-step" in error_of(job)
    (one / "latest_checkpointed_iteration.txt").write_text("abc")
    assert "latest_checkpointed_iteration.txt holds 'abc'" in error_of(resumed(tmp_path / "tracker", one))


@pytest.mark.slow
def test_a_manifest_that_was_harmed_is_no_manifest_and_none_is_said(
    tmp_path: Path, written: tuple[Path, JobResult]
) -> None:
    load = harmed(written[0], tmp_path / "harmed", {f"iter_0000006/{MANIFEST}": flip})
    job = resumed(tmp_path / "events", load)
    assert job.code == 0 and min(job.committed) == 5, job.output[-3000:]
    assert said(job, load)[0].startswith("iter_0000006 is skipped: its manifest cannot be relied on")
    (load / "iter_0000006" / MANIFEST).unlink()
    job = resumed(tmp_path / "without", load)
    assert job.code == 0 and min(job.committed) == 7, job.output[-3000:]
    lines = said(job, load)
    assert len(lines) == 1 and lines[0].startswith("iter_0000006 is loaded unverified: it has no manifest")


@pytest.mark.slow
def test_what_plain_megatron_wrote_is_loaded_and_a_line_says_that_nothing_was_verified(tmp_path: Path) -> None:
    saving = ("--save", str(tmp_path / "plain"), "--save-interval", "2", "--train-iters", "2")
    jobs = [{"name": "plain", "world": 1, "seconds": 120, "arguments": [*MODEL, *QUIET, *saving]}]
    jobs.append({"name": "whole", "world": 1, "seconds": 120, "arguments": [*MODEL, *QUIET, "--train-iters", "8"]})
    assert run_jobs(tmp_path, jobs) == {"plain": [0], "whole": [0]}, json.dumps(jobs)
    job = resumed(tmp_path / "events", tmp_path / "plain")
    assert job.code == 0 and min(job.committed) == 3, job.output[-3000:]
    assert [line.split(" (")[0] for line in said(job, tmp_path / "plain")] == [
        "iter_0000002 is loaded unverified: it has no manifest"
    ]
    # Megatron's second line after a start averages two steps.
    known = {step: loss for step, loss in losses(logs(tmp_path, "whole")).items() if step > 4}
    assert largest_deviation(known, job.losses) < ROUNDING


@pytest.mark.slow
def test_a_newer_non_persistent_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    often = ("--non-persistent-save-interval", "2", "--non-persistent-ckpt-type", "global", "--save-interval", "3")
    saving = (*often, "--save", str(tmp_path / "saved"))
    job = elastic_job(tmp_path / "events", 2, 1, 1, STEPS + 2, *QUIET, *saving, "--exit-interval", "4")
    assert job.code == 0 and complete(tmp_path / "saved" / "non_persistent")[-1] == 4, job.output[-4000:]
    shutil.rmtree(tmp_path / "saved" / "iter_0000004", ignore_errors=True)  # the end of the job
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("3")
    whole = elastic_job(tmp_path / "whole", 2, 1, 1, STEPS + 2, *QUIET)
    later = resumed(tmp_path / "later", tmp_path / "saved", *often)
    assert later.code == 0 and min(later.committed) == 5, later.output[-4000:]
    known = {step: loss for step, loss in whole.committed.items() if step > 4}
    assert largest_deviation(known, later.committed) < ROUNDING
    assert "non_persistent/iter_0000004 is verified" in said(later, tmp_path / "saved")[0]


@pytest.mark.slow
def test_arguments_come_from_an_older_checkpoint_where_the_newest_is_damaged(
    tmp_path: Path, written: tuple[Path, JobResult]
) -> None:
    load = harmed(written[0], tmp_path / "harmed", {"iter_0000006/common.pt": cut})
    job = resumed(tmp_path / "events", load, "--use-checkpoint-args")
    assert job.code == 0 and min(job.committed) == 5, job.output[-3000:]
    (load / "iter_0000006" / MANIFEST).unlink()
    job = resumed(tmp_path / "without", load, "--use-checkpoint-args")
    assert "--load" in error_of(job) and "it is truncated or damaged" in error_of(job)
