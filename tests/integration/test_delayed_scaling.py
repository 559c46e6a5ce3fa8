"""Scales of FP8 that follow past steps are plain Megatron's, and the same whether or not ranks were lost.

Transformer Engine needs a GPU. Real jobs on a CPU with layers that keep scales and histories as its layers do
(``delayed_scaling_training.py``).
"""

from __future__ import annotations

import io
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader

from tests.integration.elastic_job import ROOT, JobResult, elastic_command, elastic_job, environment_of
from tests.integration.kill_walk import LAYOUTS, cases_of, victim, walk
from tests.integration.test_cpu_layouts import losses

SCRIPT = ROOT / "tests" / "integration" / "delayed_scaling_training.py"
STEPS = 6
FP8 = (
    *("--fp8-format", "hybrid", "--fp8-recipe", "delayed"),
    *("--fp8-amax-history-len", "4", "--fp8-amax-compute-algo", "max"),
)
FLAGS = ("--hidden-dropout", "0", "--attention-dropout", "0", *FP8)
ONE = ("--global-batch-size", "4")
"""One micro-batch a replica and step: plain Megatron then has the largest values of a step, too."""
EXACT = ("--elastic-exact", "--calculate-per-token-loss")
ROUNDING = 5e-5
"""A sum that is rounded otherwise may round a value to another one of FP8."""


def elastic(folder: Path, *flags: str, environment: dict[str, str] | None = None) -> JobResult:
    """PP 2 x DP 2 under the engine."""
    result = elastic_job(folder, 4, 1, 2, STEPS, *FLAGS, *flags, script=SCRIPT, environment=environment)
    assert result.code == 0, result.output[-6000:]
    return result


def plain(folder: Path, *flags: str) -> dict[int, float]:
    """Step → loss of PP 2 x DP 2 without the engine."""
    command = elastic_command(folder, 4, 1, 2, STEPS, *FLAGS, script=SCRIPT)
    done = subprocess.run(
        [*command[: command.index("--elastic")], *FLAGS, *flags],
        cwd=ROOT,
        env=environment_of(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return losses(done.stdout)


def saved_at(folder: Path, step: int, *more: str) -> tuple[str, ...]:
    return "--save", str(folder), "--save-interval", str(step), "--lr-decay-iters", "12", *more


def deviation(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest relative deviation, of the steps that both have.

    Without the second step of a job: Megatron prints the mean of the first two there.
    """
    both = (one.keys() & other.keys()) - {min(one) + 1, min(other) + 1}
    assert both
    return max(abs(one[step] - other[step]) / abs(other[step]) for step in both)


def scales_in(folder: Path, step: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Layer and buffer → (scales, largest value of each history) in a checkpoint."""
    reader = FileSystemReader(folder / f"iter_{step:07d}")
    names = [name for name in reader.read_metadata().state_dict_metadata if "_extra_state" in name]
    objects: dict[str, Any] = {name: io.BytesIO() for name in names}
    checkpoint.load(objects, storage_reader=reader, no_dist=True)
    found = {}
    for name, (state, *_) in objects.items():
        if isinstance(state, torch.Tensor):
            for buffer, (scale, history) in pickle.loads(state.numpy().tobytes()).items():
                found[f"{name} {buffer}"] = torch.tensor(scale), torch.tensor(history).amax(0)
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """Checkpoints of steps 3 and 6 of plain Megatron, and its losses."""
    folder = tmp_path_factory.mktemp("plain") / "saved"
    return folder, plain(folder.parent, *ONE, *saved_at(folder, 3))


@pytest.mark.slow
def test_losses_and_saved_scales_are_plain_megatrons(tmp_path: Path, reference: tuple[Path, dict[int, float]]) -> None:
    folder, expected = reference
    result = elastic(tmp_path / "events", *ONE, *saved_at(tmp_path / "saved", 3))
    assert len(expected) == STEPS and deviation(result.losses, expected) < ROUNDING
    found, wanted = scales_in(tmp_path / "saved", 6), scales_in(folder, 6)
    assert found.keys() == wanted.keys() and len(found) == 4 * 4 * 2
    for name, (scale, history) in found.items():
        torch.testing.assert_close(scale, wanted[name][0], rtol=0.1, atol=0.0)
        torch.testing.assert_close(history, wanted[name][1], rtol=0.1, atol=0.0)
    assert any((scale > 1.0).any() for scale, _ in found.values())


@pytest.mark.slow
def test_a_checkpoint_of_plain_megatron_goes_on_with_its_scales(
    tmp_path: Path, reference: tuple[Path, dict[int, float]]
) -> None:
    folder, expected = reference
    result = elastic(tmp_path, *ONE, "--load", str(folder), "--ckpt-step", "3", "--lr-decay-iters", "12")
    assert min(result.losses) == 4 and deviation(result.losses, expected) < ROUNDING


@pytest.mark.slow
def test_plain_megatron_goes_on_from_ours(tmp_path: Path, reference: tuple[Path, dict[int, float]]) -> None:
    elastic(tmp_path / "events", *ONE, *saved_at(tmp_path / "saved", 3, "--exit-interval", "3"))
    found = plain(tmp_path, *ONE, "--load", str(tmp_path / "saved"), "--lr-decay-iters", "12")
    assert min(found) == 4 and deviation(found, reference[1]) < ROUNDING


@pytest.mark.slow
def test_a_run_that_is_saved_and_loaded_has_the_same_bits(tmp_path: Path) -> None:
    """With four micro-batches a replica and step: Transformer Engine would change scales with each of them."""
    whole = elastic(tmp_path / "whole", *EXACT, *saved_at(tmp_path / "saved", 3))
    loaded = ("--load", str(tmp_path / "saved"), "--ckpt-step", "3", "--lr-decay-iters", "12")
    rest = elastic(tmp_path / "rest", *EXACT, *loaded)
    assert rest.committed == {step: whole.committed[step] for step in (4, 5, 6)}


@pytest.mark.parametrize(
    ("points", "ranks"),
    [
        (["mid_backward"], {3}),
        pytest.param(["after_ship", "before_vote", "after_vote", "mid_update"], {0, 3}, marks=pytest.mark.slow),
    ],
    ids=["one", "more"],
)
def test_losses_of_ranks_change_no_bit(tmp_path: Path, points: list[str], ranks: set[int]) -> None:
    """Each rank comes back and takes part with the scales of the others; compared with one replica."""
    layout = LAYOUTS["pp2dp2"]
    cases = [case for point in points for case in cases_of(layout, point) if victim(case) in ranks]
    walked = walk(tmp_path, layout, cases, *EXACT, *FP8, script=SCRIPT)
    assert walked.deviation == 0.0 and walked.returns == walked.kills == len(cases)


@pytest.mark.slow
def test_scales_that_follow_the_micro_batches_of_a_rank_give_other_losses(tmp_path: Path) -> None:
    """Without the row of the patch table: so the other tests can fail."""
    ours = elastic(tmp_path / "ours", *EXACT)
    others = elastic(tmp_path / "others", *EXACT, environment={"SCALES_OF_ONE_RANK": "1"})
    assert others.committed != ours.committed
