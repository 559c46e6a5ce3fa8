"""Faults of GPUs are read from a driver library with NVML's names, in a process of its own for each state."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.elastic._frequency import Unavailable
from megatron.elastic.platform.gpu_health import GpuHealth
from tests.unit.frequency.conftest import compiled, state

__all__ = ["compiled", "state"]

LOOKS = """
import sys
from megatron.elastic.platform.gpu_health import GpuHealth
gpus = GpuHealth(sys.argv[1])
for line in sys.stdin:
    exec(line)
    print(gpus.look(), flush=True)
"""


def looks(library: Path, *before: str) -> list[str]:
    """The findings of one look after each statement of ``before``."""
    done = subprocess.run(
        [sys.executable, "-c", LOOKS, str(library)],
        input="".join(f"{statement}\n" for statement in before),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def write(path: Path, text: str) -> str:
    return f"open({str(path)!r}, 'w').write({text!r})"


def test_an_xid_error_of_the_hardware_stays_a_finding_and_one_of_a_program_is_none(
    compiled: dict[str, Path], state: Path
) -> None:
    second = state.with_name(f"{state.name}.1")
    second.write_text("0 1 0\n")
    xid = second.with_name(f"{second.name}.xid")
    found = looks(compiled["nvml"], "pass", write(xid, "31"), write(xid, "79"), "pass")
    assert found == ["", "", *2 * ["GPU 1: XID 79, GPU has fallen off the bus"]]


@pytest.mark.parametrize(
    ("counters", "finding"),
    [
        ("3 0 0 0", "GPU 0: 3 uncorrected ECC errors since the start"),
        ("0 1 0 0", "GPU 0: remapping of a memory row waits for a reset of the GPU"),
        ("0 1 1 0", "GPU 0: remapping of a memory row has failed"),
        ("0 0 0 1", "GPU 0: the driver has lost it"),
    ],
)
def test_counters_of_memory_errors_are_findings(
    compiled: dict[str, Path], state: Path, counters: str, finding: str
) -> None:
    health = state.with_name(f"{state.name}.health")
    assert looks(compiled["nvml"], "pass", write(health, counters)) == ["", finding]


def test_errors_before_the_start_are_no_finding(compiled: dict[str, Path], state: Path) -> None:
    state.with_name(f"{state.name}.health").write_text("7 0 0 0")
    assert looks(compiled["nvml"], "pass") == [""]


def test_a_machine_without_the_driver_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"cannot load .*absent"):
        GpuHealth(str(tmp_path / "absent.so"))
