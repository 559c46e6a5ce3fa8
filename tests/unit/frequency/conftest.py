"""Stand-in driver libraries, compiled and really loaded; a sysfs tree for cpufreq."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "standin"
POLICIES = {0: "0 1", 2: "2 3"}


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("standin")
    built = {}
    for name in ("nvml", "dcmi"):
        built[name] = folder / f"lib{name}_standin.so"
        source = SOURCES / f"{name}.c"
        compiler = os.environ.get("CC", "cc")
        soname = {"nvml": "libnvidia-ml.so.1", "dcmi": "libdcmi.so"}[name]
        flags = ["-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{soname}"]
        subprocess.run([compiler, *flags, "-o", built[name], source], check=True)
    return built


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in devices' memory; the guard process inherits the variable."""
    path = tmp_path / "device_state"
    monkeypatch.setenv("STANDIN_STATE", str(path))
    return path


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two cpufreq policies of two CPUs each, free between 800 MHz and 3 GHz, and one RAPL package."""
    root = tmp_path / "sys"
    for number, cpus in POLICIES.items():
        policy = root / f"devices/system/cpu/cpufreq/policy{number}"
        policy.mkdir(parents=True)
        values = {
            "affected_cpus": cpus,
            "cpuinfo_min_freq": 800_000,
            "cpuinfo_max_freq": 3_000_000,
            "scaling_min_freq": 800_000,
            "scaling_max_freq": 2_800_000,
            "scaling_cur_freq": 2_500_000 + number,
        }
        for name, value in values.items():
            (policy / name).write_text(f"{value}\n")
    package = root / "class/powercap/intel-rapl:0"
    (root / "class/powercap/intel-rapl:0:0").mkdir(parents=True)
    package.mkdir(parents=True, exist_ok=True)
    (package / "energy_uj").write_text("1000\n")
    (package / "max_energy_range_uj").write_text("5000000\n")
    return root
