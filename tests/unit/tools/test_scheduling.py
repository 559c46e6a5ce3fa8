"""A run of several processes: who takes which tests, and what becomes of a test that fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CORES = max(2, os.cpu_count() or 1)
PLUGINS = ("xdist", "pytest_timeout", "pytest_rerunfailures", "tests.scheduling")
SHARED = """
import pytest
@pytest.fixture(scope="module")
def made(tmp_path_factory): print("made")
"""
TESTS = {
    "integration/test_shared.py": SHARED + "\n".join(f"def test_{i}(made): pass" for i in range(6)),
    "integration/test_jobs.py": "\n".join(f"def test_{i}(): pass" for i in range(4 * CORES)),
    "unit/test_units.py": "\n".join(f"def test_{i}(): pass" for i in range(30)),
}
FLAKY = """
import pathlib
def test_once():
    first = pathlib.Path("failed")
    if not first.exists():
        first.touch()
        assert False, "the first time"
"""


def run(folder: Path, tests: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """Write ``tests`` below ``folder`` and run them as ``scripts/test.sh`` does."""
    for name, text in tests.items():
        path = folder / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib -ra\n")
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    plugins = [word for name in PLUGINS for word in ("-p", name)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "--dist", "loadscope", "--reruns", "1", *options],
        cwd=folder,
        env={**ours, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_jobs_run_in_as_many_workers_as_there_are_cores_and_shared_fixtures_are_made_once(tmp_path: Path) -> None:
    done = run(tmp_path, TESTS, "-n", str(CORES + 1), "-v", "-rP")
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"\[(gw\d+)\].* PASSED tests/(\w+)/(\w+)\.py", done.stdout)
    assert len(ran) == 6 + 4 * CORES + 30
    assert len({worker for worker, folder, _ in ran if folder == "integration"}) <= CORES
    assert len({worker for worker, _, file in ran if file == "test_shared"}) == 1
    assert done.stdout.count("\nmade\n") == 1


@pytest.mark.parametrize("options", [("-n", "2"), ()])
def test_a_test_that_passes_the_second_time_is_named_with_its_failure(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run(tmp_path, {"unit/test_flaky.py": FLAKY}, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "UNSTABLE tests/unit/test_flaky.py::test_once" in done.stdout and "the first time" in done.stdout


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, {"unit/test_broken.py": "def test_it(): assert False"}, "-n", "2", "-q")
    assert done.returncode == 1 and "UNSTABLE" not in done.stdout
    assert re.match(r"1 failed, 1 rerun in [\d.]+s", done.stdout.splitlines()[-1]), done.stdout


def test_a_test_that_hangs_ends_with_the_stacks_of_its_threads(tmp_path: Path) -> None:
    hangs = "import time\ndef test_it():\n    time.sleep(60)\n"
    done = run(tmp_path, {"unit/test_hangs.py": hangs}, "-n", "2", "--timeout", "1", "--reruns", "0")
    assert done.returncode == 1 and "Timeout (>1.0s)" in done.stdout and "time.sleep(60)" in done.stdout
