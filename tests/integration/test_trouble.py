"""Trouble that comes back ends a job, trouble that does not costs a step computed again; and what a loss must return.

The scripts are a user's: ``pretrain_gpt`` with another loss function.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.elastic_job import JobResult, elastic_job, largest_deviation

QUIET = ("--hidden-dropout", "0", "--attention-dropout", "0", "--lr-decay-iters", "8")
STEPS = 4

SCRIPT = """
import megatron.elastic.adaptor  # first, as in any script of a user
import os
from functools import partial

import torch
import pretrain_gpt
from megatron.training import get_args
from pathlib import Path

plain = pretrain_gpt.loss_func


def loss_func(loss_mask, output):
{body}


def forward_step(data_iterator, model):
    output, original = pretrain_gpt.forward_step(data_iterator, model)
    return output, partial(loss_func, *original.args)


if __name__ == "__main__":
    pretrain_gpt.run(pretrain_gpt.datasets_provider, pretrain_gpt.model_provider, forward_step,
                     {{"tokenizer_type": "GPT2BPETokenizer"}})
"""

DISAGREEING = """
    from megatron.elastic.engine.compute.point_to_point import BoundaryTransport

    send = BoundaryTransport.send
    if get_args().curr_iteration == 1:  # from the second step on the last stage sends back more than is expected
        BoundaryTransport.send = lambda self, rows, *where, **how: send(self, torch.cat([rows, rows]), *where, **how)
    return plain(loss_mask, output)
"""

MEAN = """
    total, tokens, report = plain(loss_mask, output)
    mean = total / tokens
    return mean, {"lm loss": mean.detach().clone()}
"""

POISONED = """
    total, tokens, report = plain(loss_mask, output)
    marks = Path(os.environ["MARKS"])
    times = len(list(marks.iterdir()))
    if get_args().curr_iteration == 2 and os.environ["RANK"] == "0" and times < int(os.environ["TIMES"]):
        (marks / str(times)).touch()
        total = total * float("nan")
    return total, tokens, report
"""


def script(folder: Path, body: str) -> Path:
    path = folder / "pretrain_custom.py"
    path.write_text(SCRIPT.format(body=body))
    return path


def run(folder: Path, body: str, *flags: str, name: str = "events") -> JobResult:
    return elastic_job(folder / name, 2, 1, 1, STEPS, *QUIET, *flags, script=script(folder, body))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> JobResult:
    return elastic_job(tmp_path_factory.mktemp("undisturbed"), 2, 1, 1, STEPS, *QUIET)


def poison(monkeypatch: pytest.MonkeyPatch, folder: Path, times: int) -> None:
    """The next ``times`` micro-batches of the third step on rank 0 have a loss that is not a number."""
    marks = folder / "marks"
    marks.mkdir()
    monkeypatch.setenv("MARKS", str(marks))
    monkeypatch.setenv("TIMES", str(times))


@pytest.mark.slow
def test_a_loss_that_is_a_mean_works_where_micro_batches_stay_whole(tmp_path: Path, undisturbed: JobResult) -> None:
    result = run(tmp_path, MEAN)
    assert result.code == 0, result.output[-4000:]
    assert largest_deviation(undisturbed.losses, result.losses) < 1e-6, "all tokens count here: mean of means"


@pytest.mark.slow
def test_a_loss_that_is_a_mean_is_refused_where_tokens_have_to_be_counted(tmp_path: Path) -> None:
    result = run(tmp_path, MEAN, "--calculate-per-token-loss")
    assert result.code == 1, result.output[-4000:]
    errors = [line for line in result.output.splitlines() if "error: " in line]
    assert len(errors) == 1 and "--calculate-per-token-loss" in errors[0] and "leave the flag out" in errors[0]
    assert "Traceback" not in result.output


def test_ranks_that_disagree_about_a_message_end_the_job_at_once_and_say_which(tmp_path: Path) -> None:
    """Nobody is lost, and whoever waits for the rank that noticed would wait for ever."""
    result = elastic_job(
        tmp_path / "events", 2, 1, 2, STEPS, *QUIET, script=script(tmp_path, DISAGREEING), seconds=100.0
    )
    assert result.code == 5, result.output[-4000:]
    (told,) = (line for line in result.output.splitlines() if "communication after step 1 failed twice" in line)
    assert re.search(r"in new groups: a message of \d+ bytes arrived where \d+ were expected", told)
    assert "Traceback" not in result.output and "no rank makes progress" not in result.output


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_once_costs_only_the_step_again(
    tmp_path: Path, undisturbed: JobResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, tmp_path, 1)
    result = run(tmp_path, POISONED)
    assert result.code == 0, result.output[-4000:]
    assert result.output.count("a gradient is not finite") == 1 and "computed again" in result.output
    assert not result.of("loss")
    assert largest_deviation(undisturbed.committed, result.committed) < 1e-6


@pytest.mark.slow
def test_one_that_comes_back_falls_to_the_checkpoint_and_then_ends_the_job(
    tmp_path: Path, undisturbed: JobResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four micro-batches a step: all of the first attempt, one of the second.
    poison(monkeypatch, tmp_path, 5)
    saved = str(tmp_path / "saved")
    flags: tuple[str, ...] = ("--save", saved, "--load", saved, "--save-interval", "1", "--no-elastic-background-save")
    result = run(tmp_path, POISONED, *flags)
    assert result.code == 0, result.output[-5000:]
    assert "goes back to its last checkpoint, of step" in result.output
    assert "successfully loaded checkpoint" in result.output
    assert largest_deviation(undisturbed.committed, result.committed) < 1e-5
    monkeypatch.setenv("TIMES", "1000")
    for mark in (tmp_path / "marks").iterdir():
        mark.unlink()
    flags = tuple(flag.replace("/saved", "/again") for flag in flags)
    result = run(tmp_path, POISONED, *flags, name="again-events")
    assert result.code == 5, result.output[-5000:]
    assert "also after the job went back to its last checkpoint" in result.output


@pytest.mark.slow
def test_without_a_checkpoint_it_ends_the_job_with_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, tmp_path, 1000)
    result = run(tmp_path, POISONED)
    assert result.code == 5, result.output[-5000:]
    assert "NotFinite: step 3: a gradient is not finite" in result.output


@pytest.mark.slow
def test_the_same_step_failing_on_all_ranks_ends_the_job_with_the_traceback(tmp_path: Path) -> None:
    """A bug in the program, not a machine: it would come back for ever."""
    flags = ("--elastic-allow-inject", "--elastic-inject", "raise:step=3,point=mid_forward,incarnation=*")
    result = elastic_job(tmp_path, 2, 1, 1, STEPS, *QUIET, *flags)
    assert result.code == 5, result.output[-4000:]
    assert "step 3 fails deterministically" in result.output
    assert "InjectedFault" in result.output and "Traceback" in result.output


def test_an_error_that_ends_all_ranks_at_once_is_not_taken_for_lost_state(tmp_path: Path) -> None:
    """Nobody is left and nobody returns; started again, the job would end so again."""
    flags = ("--no-elastic-respawn", "--elastic-allow-inject", "--elastic-inject", "raise:step=2,point=mid_forward")
    result = elastic_job(tmp_path, 2, 1, 1, STEPS, *QUIET, *flags)
    assert result.code == 5, result.output[-4000:]
    assert "step 2 fails deterministically" in result.output
    assert "InjectedFault" in result.output and "Traceback" in result.output
    assert re.search(r"ends with exit status 5 after .*\n.*steps 1 to 1 of", result.output), result.output[-4000:]
