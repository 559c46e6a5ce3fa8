"""Reduced precision under --elastic is Megatron's: bf16, and fp16 whose overflows are skipped and whose scale follows.

Two replicas, dropout 0; then two stages of two replicas that lose ranks of both. In fp16
the first steps overflow at the initial scale, later ones when it has grown again: skips,
scales, losses and norms are compared with plain Megatron's line by line.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.elastic_job import MODEL, elastic_job, largest_deviation
from tests.integration.test_cpu_layouts import gradient_norms, logs, losses, run_jobs

STEPS = 9
QUIET = ("--hidden-dropout", "0", "--attention-dropout", "0", "--lr-decay-iters", "8")
FP16 = (
    "--fp16",
    "--initial-loss-scale",
    "4194304",
    "--hysteresis",
    "1",
    "--loss-scale-window",
    "3",
    "--accumulate-allreduce-grads-in-fp32",
    "--log-num-zeros-in-grad",
)  # as the engine always does
MOMENTS = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
CASES = {"bf16": (("--bf16",), 1e-4), "fp16": (FP16, 1e-5), "bf16 moments": (("--bf16", *MOMENTS), 1e-4)}
"""Flags, and the largest relative deviation: sums are rounded in another order."""


def scales(text: str) -> list[tuple[float, int]]:
    """(loss scale, skipped steps) of every line."""
    found = re.findall(r"loss scale: (\S+) .*?number of skipped iterations: +(\d+)", text)
    return [(float(scale), int(skipped)) for scale, skipped in found]


def zeros(text: str) -> dict[int, int]:
    """Step → zeros in its gradient, of the lines that tell them."""
    return {int(step): int(count) for step, count in re.findall(r"iteration +(\d+)/.*? num zeros: (\d+)", text)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_reduced_precision_is_megatrons(tmp_path: Path, kind: str) -> None:
    flags, allowed = CASES[kind]
    steps = STEPS if kind == "fp16" else 4
    arguments = [*MODEL, *QUIET, *flags, "--train-iters", str(steps)]
    codes = run_jobs(tmp_path, [{"name": "plain", "world": 2, "seconds": 200, "arguments": arguments}])
    assert codes == {"plain": [0, 0]}, logs(tmp_path, "plain")[-3000:]
    plain = logs(tmp_path, "plain")
    result = elastic_job(tmp_path / "events", 2, 1, 1, steps, *QUIET, *flags)
    assert result.code == 0, result.output[-4000:]
    assert len(losses(plain)) >= 4 and set(losses(plain)) == set(result.losses)
    reported = {step: loss for step, loss in losses(plain).items() if loss}  # a skipped step reports 0
    assert {step for step, loss in result.losses.items() if loss} == set(reported)
    assert largest_deviation(reported, result.losses) < allowed
    norms = [(float(a), float(b)) for a, b in zip(gradient_norms(plain), gradient_norms(result.output), strict=True)]
    assert all(abs(a - b) <= 1.01e-3 + 10 * allowed * a for a, b in norms), norms
    assert scales(plain) == scales(result.output)
    assert zeros(plain).keys() == zeros(result.output).keys(), "a skipped step has none"
    if kind == "fp16":
        skipped = sum(count for _, count in scales(plain))
        assert 2 <= skipped < STEPS - 3, f"{skipped} of {STEPS} steps overflow: the test needs some, not all"


FAULTS = "kill:rank=0,step=3,point=mid_backward;kill:rank=3,losses=1,wait=1,point=after_vote"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["bf16", "fp16", "bf16 moments"],
)
def test_losses_in_reduced_precision_cost_no_step(tmp_path: Path, kind: str) -> None:
    """A stage's survivor is alone in its pipeline group for a while, and still converts as its own stage does."""
    flags, _ = CASES[kind]
    # Of as many replicas: their number is in the weight of a micro-batch, and so in what overflows.
    whole = elastic_job(tmp_path / "whole", 4, 1, 2, STEPS, *flags)
    faults = ("--elastic-allow-inject", "--elastic-inject", FAULTS)
    killed = elastic_job(tmp_path / "killed", 4, 1, 2, STEPS, *flags, *faults)
    assert (whole.code, killed.code) == (0, 0), killed.output[-4000:]
    assert len(killed.of("loss")) >= 2 and all(record.fields["lost_steps"] == 0 for record in killed.of("recovery"))
    assert set(killed.committed) == set(whole.committed) == set(range(1, STEPS + 1))
    assert scales(whole.output) == scales(killed.output)
    assert largest_deviation(whole.committed, killed.committed) < 1e-4


@pytest.mark.slow
def test_a_loaded_loss_scale_counts_for_a_dynamic_one_alone(tmp_path: Path) -> None:
    """As in plain Megatron: one that is given, and a type that needs none, are those of the present flags."""
    saved, fp16 = str(tmp_path / "saved"), ("--fp16", "--accumulate-allreduce-grads-in-fp32")
    dynamic = (*fp16, "--initial-loss-scale", "65536")
    saving = ("--save", saved, "--save-interval", "2", "--exit-interval", "2")
    first = elastic_job(tmp_path / "first", 2, 1, 1, 3, *QUIET, *dynamic, *saving)
    assert first.code == 0, first.output[-4000:]
    kinds = {"dynamic": ((*fp16, "--initial-loss-scale", "1024"), 65536.0), "none": (("--bf16",), 1.0)}
    kinds["constant"] = ((*fp16, "--loss-scale", "128"), 128.0)
    for kind, (flags, scale) in kinds.items():
        job = elastic_job(tmp_path / kind, 2, 1, 1, 3, *QUIET, *flags, "--load", saved)
        assert job.code == 0, job.output[-4000:]
        assert scales(job.output) == [(scale, 0)], kind


@pytest.mark.slow
def test_a_checkpoint_from_before_the_first_update_resumes(tmp_path: Path) -> None:
    """Megatron leaves the optimizer's step out of a checkpoint where it is 0."""
    whole = elastic_job(tmp_path / "whole", 2, 1, 1, STEPS, *QUIET, *FP16)
    save = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "1", "--exit-interval", "1")
    begun = elastic_job(tmp_path / "begun", 2, 1, 1, STEPS, *QUIET, *FP16, *save)
    resumed = elastic_job(tmp_path / "resumed", 2, 1, 1, STEPS, *QUIET, *FP16, "--load", save[1])
    assert (whole.code, begun.code, resumed.code) == (0, 0, 0), resumed.output[-4000:]
    assert scales(begun.output)[0][1] == 1, "its only step is skipped"
    assert [scale for scale, _ in scales(resumed.output)] == [scale for scale, _ in scales(whole.output)][1:]
    left = {step: loss for step, loss in whole.committed.items() if step > 1}
    assert largest_deviation(left, resumed.committed) < 1e-5
