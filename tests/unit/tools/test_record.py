"""The last line that a benchmark prints is kept; one that fails leaves the figures before it as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.record import STANDARD, Benchmark, last_object, record


def test_every_standard_benchmark_exists() -> None:
    folder = Path(__file__).resolve().parents[3] / "tools" / "bench"
    assert all((folder / f"{benchmark.module}.py").is_file() for benchmark in STANDARD.values())


def test_figures_are_kept_with_their_command(tmp_path: Path) -> None:
    quick = Benchmark("movement", ("--changes", "3", "--units", "4", "--blocks", "8"))
    record("movement", quick, tmp_path)
    kept = json.loads((tmp_path / "movement.json").read_text())
    assert kept["command"] == "python -m tools.bench.movement --changes 3 --units 4 --blocks 8"
    assert kept["machine"]
    alone = [case for case in kept["layer_moves"] if case["mirrors"] == 0]
    assert all(case["interleaved"]["blocks"] == 8 for case in alone), "each block of the layer once, and no other"


def test_a_benchmark_that_fails_changes_nothing(tmp_path: Path) -> None:
    before = tmp_path / "movement.json"
    before.write_text("{}")
    with pytest.raises(RuntimeError, match="movement"):
        record("movement", Benchmark("movement", ("--no-such-flag",)), tmp_path)
    assert before.read_text() == "{}"


def test_a_benchmark_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="timed out"):
        record("movement", Benchmark("movement", ("--changes", "1000000"), seconds=1), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("printed", ["", "done\n", "{}\n[1]\n"])
def test_what_ends_otherwise_has_no_figures(printed: str) -> None:
    with pytest.raises(ValueError, match=r"JSON object|Expecting value"):
        last_object(printed)
