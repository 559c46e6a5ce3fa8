"""In a real job clocks fall where ranks wait, rise while a rank is missing, and are put back, after a SIGKILL too.

The driver library is the stand-in of ``tests/unit/frequency``: compiled here, really loaded by every rank, one GPU a
rank, its state a file. Slack is made: two ranks are a pipeline of one layer and of three with a head that costs
several more, and the second one's computations take three times as long. So the first waits, on any machine.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.integration.elastic_job import ROOT, JobResult, elastic_job

NOMINAL_KHZ, UNLOCKED, KILLED_AT, STEPS = 1_980_000, "0 1 0\n", 12, 16
UNEVEN = shlex.split("""
    --vocab-size 8191 --hidden-dropout 0 --attention-dropout 0 --decoder-first-pipeline-num-layers 1
    --elastic-fail-slow off --elastic-allow-inject
""")
SLOW = "slow:rank=1,factor=3"
BOOSTED = shlex.split("--hidden-dropout 0 --attention-dropout 0 --elastic-fail-slow off --elastic-allow-inject")


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Path]]:
    """The library, and one state file a GPU."""
    library, state = tmp_path / "libnvml_standin.so", tmp_path / "gpu"
    source = ROOT / "tests/unit/frequency/standin/nvml.c"
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", str(library), str(source)], check=True)
    files = [state, *(state.with_suffix(f".{number}") for number in (1, 2, 3))]
    for file in files:
        file.write_text(UNLOCKED)
    monkeypatch.setenv("STANDIN_STATE", str(state))
    return library, files


def uneven_job(tmp_path: Path, library: Path, steps: int, *flags: str) -> JobResult:
    """The first of two stages has next to nothing to do."""
    driver = f"nvml:{{local_rank}}:{library}"
    result = elastic_job(tmp_path / "events", 2, 1, 2, steps, *UNEVEN, "--elastic-frequency", driver, *flags)
    assert result.code == 0, result.output[-6000:]
    assert set(result.committed) == set(range(1, steps + 1))
    return result


@pytest.mark.slow
def test_slack_lowers_clocks_and_everything_is_put_back(tmp_path: Path, devices: tuple[Path, list[Path]]) -> None:
    """The rank at a lower clock is killed and does not come back: whoever put its clock back was another process."""
    library, files = devices
    fault = f"{SLOW};kill:rank=0,step={KILLED_AT}"
    result = uneven_job(tmp_path, library, STEPS, "--no-elastic-respawn", "--elastic-inject", fault)
    assert "--elastic-frequency: " in result.output
    clocks = [(r.rank, r.fields["step"], r.fields["set_khz"]) for r in result.of("clock")]
    lowered = {rank for rank, step, khz in clocks if step < KILLED_AT and khz < NOMINAL_KHZ}
    assert lowered == {0}, f"the first stage has the slack: {clocks}"
    assert [khz for rank, _, khz in clocks if rank == 0][-1] < NOMINAL_KHZ, "it had put its clock back by itself"
    assert all(record.fields["verified"] for record in result.of("clock"))
    assert {record.fields["power_mw"] for record in result.of("clock")} == {412_345}
    assert [file.read_text() for file in files] == [UNLOCKED] * 4


@pytest.mark.slow
def test_no_permission_is_one_line_and_no_clock(tmp_path: Path, devices: tuple[Path, list[Path]]) -> None:
    library, files = devices
    for file in files:
        file.write_text("0 0 0\n")
    result = uneven_job(tmp_path, library, 8, "--elastic-inject", SLOW)
    refusals = [line for line in result.output.splitlines() if "locking GPU clocks needs root" in line]
    told = [line.split(":")[0].strip() for line in refusals]
    assert told == ["rank 0"], "the first stage has the slack, and asks; it is refused once and does not ask again"
    assert result.of("clock") == []


@pytest.mark.slow
def test_while_a_rank_is_missing_the_others_run_above_their_clock(
    tmp_path: Path, devices: tuple[Path, list[Path]]
) -> None:
    """GPUs locked at 1.5 GHz before the job: that is what clocks are raised from."""
    library, files = devices
    for file in files:
        file.write_text("1500 1 0\n")
    script = "kill:rank=3,step=6,point=before_reduce"
    flags = ("--elastic-frequency", f"nvml:{{local_rank}}:{library}", "--elastic-frequency-boost")
    further = ("--no-elastic-respawn", "--elastic-tensor", "live-on", "--elastic-inject", script)
    result = elastic_job(tmp_path / "events", 4, 2, 1, 24, *BOOSTED, *flags, *further)
    assert result.code == 0, result.output[-6000:]
    raised = [(r.rank, r.fields["step"]) for r in result.of("clock") if r.fields["set_khz"] > 1_500_000]
    assert raised and min(step for _, step in raised) > 6, f"nothing rises before the loss: {raised}"
    untouched = {rank for rank in range(4) if files[rank].read_text() == "1500 1 0\n"}
    assert untouched.isdisjoint(record.rank for record in result.of("clock")), "what was set is put back"
    assert not list(tmp_path.glob("gpu*.power")), "power limits are put back"
