"""Ranks with slack run at lower clocks in a real job, and every clock is put back, after a SIGKILL too.

The driver library is the stand-in of ``tests/unit/frequency``: compiled here,
really loaded by every rank, one GPU a rank, its state a file. The second stage
has a head that costs several layers, so the first one waits for it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.elastic_job import ROOT, elastic_job

NOMINAL_KHZ, UNLOCKED, KILLED_AT, STEPS = 1_980_000, "0 1 0\n", 12, 16
MODEL = ("--vocab-size", "8191", "--hidden-dropout", "0", "--attention-dropout", "0")


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Path]]:
    """The library, and one state file a GPU."""
    library, state = tmp_path / "libnvml_standin.so", tmp_path / "gpu"
    source = ROOT / "tests/unit/frequency/standin/nvml.c"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    files = [state, *(state.with_suffix(f".{number}") for number in (1, 2, 3))]
    for file in files:
        file.write_text(UNLOCKED)
    monkeypatch.setenv("STANDIN_STATE", str(state))
    return library, files


@pytest.mark.slow
def test_slack_lowers_clocks_and_everything_is_put_back(tmp_path: Path, devices: tuple[Path, list[Path]]) -> None:
    library, files = devices
    fault = f"kill:rank=0,step={KILLED_AT}"
    result = elastic_job(
        tmp_path / "events", 4, 1, 2, STEPS, *MODEL, "--elastic-frequency", f"nvml:{{local_rank}}:{library}",
        "--no-elastic-respawn", "--elastic-allow-inject", "--elastic-inject", fault,
    )  # fmt: skip
    assert result.code == 0, result.output[-6000:]
    assert "--elastic-frequency: " in result.output
    clocks = [(r.rank, r.fields["step"], r.fields["set_khz"]) for r in result.of("clock")]
    lowered = {rank for rank, step, khz in clocks if step < KILLED_AT and khz < NOMINAL_KHZ}
    assert lowered == {0, 1}, f"the first stage has the slack: {clocks}"
    assert all(record.fields["verified"] for record in result.of("clock"))
    assert {record.fields["power_mw"] for record in result.of("clock")} == {412_345}
    assert set(result.committed) == set(range(1, STEPS + 1))
    assert [file.read_text() for file in files] == [UNLOCKED] * 4


@pytest.mark.slow
def test_no_permission_is_one_line_and_no_clock(tmp_path: Path, devices: tuple[Path, list[Path]]) -> None:
    library, files = devices
    for file in files:
        file.write_text("0 0 0\n")
    result = elastic_job(
        tmp_path / "events", 4, 1, 2, 8, *MODEL, "--elastic-frequency", f"nvml:{{local_rank}}:{library}",
    )  # fmt: skip
    assert result.code == 0, result.output[-6000:]
    refusals = [line for line in result.output.splitlines() if "locking GPU clocks needs root" in line]
    told = [line.split(":")[0].strip() for line in refusals]
    assert {"rank 0", "rank 1"} <= set(told), "the first stage has the slack, and asks"
    assert len(told) == len(set(told)), "who is refused says so once and does not ask again"
    assert result.of("clock") == []
