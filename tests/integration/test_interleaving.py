"""Megatron's interleaved schedule under --elastic: several model chunks a stage, at launch and whenever all are there.

Real jobs, real SIGKILLs. That nothing failing gives Megatron's own losses is in ``test_engine_parity``, that kills at
every named point cost no step in ``test_losing_ranks`` (layout pp2dp2v2); here is what else meets model chunks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.elastic.engine.compute.ledger import sample_digest
from tests.integration.elastic_job import MODEL, JobResult, elastic_job, largest_deviation
from tests.integration.test_cpu_layouts import logs, losses, run_jobs
from tests.integration.test_recut import cuts
from tools.fingerprint import checkpoint_fingerprint, differences, events_fingerprint

pytestmark = pytest.mark.slow

STEPS = 8
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
CALM = ("--hidden-dropout", "0", "--attention-dropout", "0")
RATES = ("--lr-decay-iters", str(STEPS))
LAUNCH = ((0, 0, 2), (1, 2, 3), (0, 3, 4), (1, 4, 6)), ((2, 0, 2), (3, 2, 3), (2, 3, 4), (3, 4, 6))
"""(cell, first unit, end unit) of two pipelines of two stages with two chunks each: four layers and both ends."""


def job(folder: Path, ranks: int, pipeline: int, *flags: str, tensor: int = 1, steps: int = STEPS) -> JobResult:
    result = elastic_job(folder, ranks, tensor, pipeline, steps, *RATES, *flags)
    assert result.code == 0, result.output[-6000:]
    assert set(result.committed) <= set(range(1, steps + 1))
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))
    return result


def kill(script: str, *flags: str) -> tuple[str, ...]:
    return "--elastic-allow-inject", "--elastic-inject", f"kill:{script}", *flags


def ledgers(result: JobResult) -> dict[int, str]:
    """Step → which samples were computed."""
    return {record.fields["step"]: record.fields["ledger"] for record in result.of("step")}


def checkpoint_of_one(folder: Path, *flags: str) -> str:
    """Of step 1: Megatron draws initial weights by pipeline stage, so that layouts start from one."""
    save = ("--save", str(folder / "start"), "--save-interval", "1", "--exit-interval", "1")
    job(folder / "begun", 1, 1, *save, *flags)
    return str(folder / "start")


@pytest.mark.parametrize("flags", [DROPOUT, (*DROPOUT, "--bf16")], ids=["fp32", "bf16"])
def test_it_trains_what_plain_pipelines_train_also_with_dropout(tmp_path: Path, flags: tuple[str, ...]) -> None:
    start = ("--load", checkpoint_of_one(tmp_path, *flags), *flags)
    plain, chunked = job(tmp_path / "plain", 4, 2, *start), job(tmp_path / "chunked", 4, 2, *start, *CHUNKS)
    assert "Number of virtual stages per pipeline stage: 2" in chunked.output
    assert largest_deviation(plain.committed, chunked.committed) < (1e-3 if "--bf16" in flags else 1e-5)
    assert ledgers(plain) == ledgers(chunked)


def test_a_damaged_pipeline_is_cut_anew_and_the_launchs_chunks_return_with_the_lost_rank(tmp_path: Path) -> None:
    reference = job(tmp_path / "whole", 4, 2, *CHUNKS, *DROPOUT)
    flags = kill("rank=2,step=3,point=mid_forward", "--elastic-migrate-after", "2")
    result = job(tmp_path / "killed", 4, 2, *CHUNKS, *DROPOUT, *flags, steps=60)
    assert largest_deviation(reference.committed, result.committed) < 1e-5
    assert ledgers(reference).items() <= ledgers(result).items()
    seen = cuts(result)
    assert LAUNCH[1] in seen[0] or LAUNCH[0] in seen[0], f"what is left keeps its chunks at first: {seen}"
    assert seen[-1] == LAUNCH, f"not the launch's pipelines in the end: {seen}"
    assert any(len(pipeline) == 1 for cut in seen for pipeline in cut), f"no pipeline was cut anew: {seen}"


def test_a_lost_stage_is_computed_elsewhere_and_what_is_saved_then_is_the_launchs(tmp_path: Path) -> None:
    """Nobody else held its chunks, and nobody is started again."""
    reference = job(tmp_path / "whole", 2, 2, *CHUNKS, *DROPOUT)
    saved = ("--save", str(tmp_path / "saved"), "--save-interval", "6", "--exit-interval", "6")
    flags = kill("rank=1,step=4,point=mid_forward", "--no-elastic-respawn", *saved)
    alone = job(tmp_path / "killed", 2, 2, *CHUNKS, *DROPOUT, *flags)
    assert cuts(alone)[-1] == (((0, 0, 6),),), "one worker computes the whole model"
    later = ("--load", str(tmp_path / "saved"), "--override-opt-param-scheduler")
    resumed = job(tmp_path / "resumed", 2, 2, *CHUNKS, *DROPOUT, *later)
    assert set(alone.committed) == set(range(1, 7)) and set(resumed.committed) == {7, 8}
    assert largest_deviation(reference.committed, {**alone.committed, **resumed.committed}) < 1e-5


@pytest.mark.parametrize("policy", ["elaswave", "recycle", "torchft-batch", "mindspeed"])
def test_policies_that_keep_the_batch_keep_the_losses(tmp_path: Path, policy: str) -> None:
    reference = job(tmp_path / "whole", 4, 2, *CHUNKS, steps=5)
    flags = kill("rank=3,step=3,point=mid_forward", "--no-elastic-respawn", "--elastic-migrate-after", "-1")
    result = job(tmp_path / policy, 4, 2, *CHUNKS, *flags, "--elastic-policy", policy, steps=5)
    assert largest_deviation(reference.committed, result.committed) < 1e-5
    assert ledgers(reference) == ledgers(result)


def test_a_dropped_replica_takes_its_samples_with_it(tmp_path: Path) -> None:
    flags = kill("rank=3,step=3,point=mid_forward", "--no-elastic-respawn", "--elastic-policy", "torchft")
    result = job(tmp_path, 4, 2, *CHUNKS, *flags, steps=5)
    first = [row for row in range(16) if row // 2 % 2 == 0]
    rows = {step: list(range(16)) if step < 3 else first for step in range(1, 6)}
    assert {step: ledger.partition(".")[0] for step, ledger in ledgers(result).items()} == {
        step: f"{sum(sample_digest(16 * (step - 1) + row) for row in own):x}" for step, own in rows.items()
    }


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_exact_mode_ends_with_the_bits_of_one_rank_alone(tmp_path: Path, schedule: str) -> None:
    exact = ("--elastic-exact", "--calculate-per-token-loss", *DROPOUT)
    start = ("--load", checkpoint_of_one(tmp_path, *exact), *exact)
    alone, torn = tmp_path / "alone", tmp_path / "torn"
    save = "--save-interval", "1000", "--save"
    job(alone / "events", 1, 1, *start, *save, str(alone / "saved"))
    flags = kill("rank=3,step=4,point=mid_backward", "--no-elastic-respawn", "--elastic-schedule", schedule)
    job(torn / "events", 4, 2, *start, *CHUNKS, *flags, *save, str(torn / "saved"))
    for kind, read in (("saved", checkpoint_fingerprint), ("events", events_fingerprint)):
        assert not list(differences(read(alone / kind), read(torn / kind))), kind


def test_a_spare_takes_a_place_with_several_chunks(tmp_path: Path) -> None:
    reference = job(tmp_path / "whole", 2, 2, *CHUNKS, *DROPOUT)
    flags = kill("rank=1,step=4,point=after_reduce", "--no-elastic-respawn", "--elastic-spares", "1")
    result = job(tmp_path / "spared", 3, 2, *CHUNKS, *DROPOUT, *flags)
    assert largest_deviation(reference.committed, result.committed) < 1e-5
    assert cuts(result)[-1] == (((0, 0, 2), (2, 2, 3), (0, 3, 4), (2, 4, 6)),), "the spare is stage 1 now"


SAVED_AT = 3
FORMATS = {
    "fp32": ((), 2e-6),
    "bf16-distributed-optimizer": (
        ("--bf16", "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"),
        2e-4,
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_checkpoints_go_both_ways_with_chunks_and_without(tmp_path: Path, kind: str) -> None:
    """Written by one of Megatron and the engine, read by the other, interleaved or not."""
    flags, rounding = FORMATS[kind]

    def saving(name: str) -> tuple[str, ...]:
        return "--save", str(tmp_path / name), "--save-interval", str(SAVED_AT), "--exit-interval", str(SAVED_AT)

    def plain(name: str, pipeline: int, *more: str) -> dict[str, Any]:
        words = [*MODEL, *CALM, *RATES, *flags, "--pipeline-model-parallel-size", str(pipeline), *more]
        return {"name": name, "world": 2, "seconds": 200, "arguments": [*words, "--train-iters", str(STEPS)]}

    def tail(values: dict[int, float]) -> dict[int, float]:
        return {step: loss for step, loss in values.items() if step > SAVED_AT + 2}  # the second line averages two

    job(tmp_path / "events", 4, 2, *CALM, *flags, *CHUNKS, *saving("ours"))
    codes = run_jobs(
        tmp_path,
        [
            plain("straight", 2, *CHUNKS),
            plain("writes", 2, *CHUNKS, *saving("theirs")),
            plain("resumes-ours-whole", 1, "--load", str(tmp_path / "ours")),
            plain("resumes-ours-chunked", 2, *CHUNKS, "--load", str(tmp_path / "ours")),
        ],
    )
    assert all(set(ranks) == {0} for ranks in codes.values()), (codes, logs(tmp_path, "resumes-ours")[-3000:])
    straight = tail(losses(logs(tmp_path, "straight")))
    assert set(straight) == set(range(SAVED_AT + 3, STEPS + 1))
    load = (*CALM, *flags, "--load", str(tmp_path / "theirs"))
    found = {
        **{name: losses(logs(tmp_path, name)) for name in ("resumes-ours-whole", "resumes-ours-chunked")},
        "whole": job(tmp_path / "whole", 4, 1, *load, tensor=2).losses,
        "chunked": job(tmp_path / "chunked", 4, 2, *load, *CHUNKS).losses,
    }
    for name, values in found.items():
        assert largest_deviation(straight, tail(values)) < rounding, (name, straight, values)
