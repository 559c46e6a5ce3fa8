"""A rank slowed down in a real job is named, is given fewer samples, and gets them back.

``slow`` makes every computation of a rank take a multiple of its time. The
samples, their weights and so the losses are those of an undisturbed run: what
moves is who computes them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic_job import JobResult, elastic_job, largest_deviation

STEPS, FROM, TO = 64, 4, 19
MODEL = (
    "--hidden-size",
    "64",
    "--seq-length",
    "128",
    "--max-position-embeddings",
    "128",
    "--hidden-dropout",
    "0.1",
    "--elastic-allow-inject",
)
SLOW = ("--elastic-fail-slow", "on", "--elastic-inject", f"slow:rank=1,step={FROM}-{TO},factor=3")


def job(folder: Path, pipeline: int, *flags: str) -> JobResult:
    result = elastic_job(folder, 4, 1, pipeline, STEPS, *MODEL, *flags)
    assert result.code == 0, result.output[-6000:]
    return result


def speeds(result: JobResult, rank: int) -> list[tuple[int, int]]:
    """(step, published ppm) of a rank."""
    return [
        (record.fields["step"], record.fields["speed_ppm"])
        for record in result.of("slow_rank")
        if record.fields["slow_rank"] == rank
    ]


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [2, 1], ids=["pp2dp2", "dp4"])
def test_a_slow_rank_is_given_less_and_gets_it_back(tmp_path: Path, pipeline: int) -> None:
    even = job(tmp_path / "even", pipeline, "--elastic-fail-slow", "off")
    slow = job(tmp_path / "slow", pipeline, *SLOW)
    published = speeds(slow, 1)
    named = [step for step, ppm in published if FROM <= step <= TO and ppm < 600_000]
    assert named and named[0] - FROM <= 12, published
    assert [ppm for step, ppm in published if step > TO][-1:] == [1_000_000], published
    nominal = 16 // (4 // pipeline)
    rows = [(record.fields["step"], record.fields["rows"]["1" if pipeline == 1 else "2"]) for record in slow.of("plan")]
    assert any(FROM < step <= TO and count < nominal for step, count in rows), rows
    assert rows[-1][1] == nominal, rows
    assert "rank 1 runs at" in slow.output
    assert largest_deviation(even.committed, slow.committed) < 1e-5
    ledgers = [{r.fields["step"]: r.fields["ledger"] for r in result.of("step")} for result in (even, slow)]
    assert ledgers[0] == ledgers[1], "the same samples, each once"


@pytest.mark.slow
def test_ranks_that_share_cores_change_no_plan_by_default(tmp_path: Path) -> None:
    """More ranks than cores: what they measure is each other."""
    result = job(tmp_path, 2, "--elastic-inject", f"slow:rank=1,step={FROM}-{TO},factor=3")
    assert result.of("slow_rank") == []
    assert result.of("plan") == []
