"""Run PyTorch's own distributed tests on backend ``elastic``, and on gloo beside it.

    python -m tools.torch_suite [--only REGEX] [--write docs/measured/torch_suite.json]

The tests are those of the installed torch (``torch.testing._internal.distributed.distributed_test``), unchanged. Many
of them name the backends that they run for. So a pass imports the suite as one of these backends would, and then its
ranks run on the backend that is under test. ``elastic`` takes the tests of gloo, with 4 ranks; of those that this
skips, the ones that ask for 8 ranks; and then those reserved to MPI, which are the all-to-all tests on the CPU. gloo
takes the first two passes.

Invariants: ranks are forked, since a fresh interpreter takes seconds to import torch; each pass is a process of its
own, because the suite reads its backend when it is imported. The exit code is 1 if a test fails on ``elastic``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["PASSES", "ROOT", "Outcome", "Pass", "outcome_of", "record", "results", "summary"]

ROOT = Path(__file__).resolve().parents[1]
TEST_SECONDS = 60
"""A test that takes longer has failed; torch's own limit is five times that."""


@dataclass(frozen=True)
class Pass:
    """Tests that the suite selects for backend ``selected_as``, run by ``ranks`` ranks on ``backend``."""

    backend: str
    selected_as: str
    ranks: int


PASSES = {
    "elastic": (Pass("elastic", "gloo", 4), Pass("elastic", "gloo", 8), Pass("elastic", "mpi", 4)),
    "gloo": (Pass("gloo", "gloo", 4), Pass("gloo", "gloo", 8)),
}
"""The passes of each backend. One runs the tests that all earlier ones skipped."""


@dataclass(frozen=True)
class Outcome:
    """The end of one test: ``passed``, ``failed`` or ``skipped``, the reason of the last two, and seconds."""

    test: str
    status: str
    reason: str
    seconds: float


# -- one pass, in a process of its own -----------------------------------------


def _suite(backend: str) -> type[unittest.TestCase]:
    """The suite's class, whose ranks are forked and run on ``backend``."""
    import torch.multiprocessing
    from torch.testing._internal.common_distributed import MultiProcessTestCase
    from torch.testing._internal.distributed import distributed_test as suite

    class DistributedTest(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(  # type: ignore[override]
            cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any
        ) -> None:
            suite.BACKEND = backend
            if backend not in suite.PROFILING_SUPPORTED_BACKENDS:
                suite.PROFILING_SUPPORTED_BACKENDS.append(backend)
                suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)
            super()._run(rank, test_name, file_name, parent_pipe, **kwargs)  # type: ignore[no-untyped-call]

    assert issubclass(DistributedTest, MultiProcessTestCase)
    return DistributedTest


def _run_pass(backend: str, only: str, into: Path) -> None:
    """Run the tests that match, one JSON line a test."""
    case = _suite(backend)
    with into.open("w", encoding="utf-8") as lines:
        for test in unittest.TestLoader().getTestCaseNames(case):
            if re.search(only, test):
                lines.write(json.dumps(asdict(outcome_of(case(test), test))) + "\n")
                lines.flush()


def outcome_of(case: unittest.TestCase | unittest.TestSuite, test: str) -> Outcome:
    """Run a test, which is called ``test``."""
    began, found = time.monotonic(), unittest.TestResult()
    case.run(found)
    wrong = [*found.failures, *found.errors]
    status = "failed" if wrong else "skipped" if found.skipped else "passed"
    reason = next((why for _, why in wrong or found.skipped), "")
    return Outcome(test, status, reason.strip(), round(time.monotonic() - began, 1))


# -- all passes ----------------------------------------------------------------


def _environment(one: Pass, folder: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "BACKEND": one.selected_as,
        "WORLD_SIZE": str(one.ranks),
        "TEMP_DIR": folder,
        "INIT_METHOD": f"file://{folder}/shared_init_file",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_SECONDS),
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }


def _outcomes(one: Pass, only: str) -> Iterator[Outcome]:
    """Run a pass. Raises ``CalledProcessError`` if its process fails."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "outcomes"
        command = [sys.executable, "-m", "tools.torch_suite", "--pass-on", one.backend, "--only", only]
        environment = _environment(one, folder)
        with (Path(folder) / "printed").open("w+", encoding="utf-8") as printed:
            done = subprocess.run(
                [*command, "--into", str(into)], cwd=ROOT, env=environment, stdout=printed, stderr=printed, check=False
            )
            if done.returncode:
                printed.seek(0)
                sys.stderr.write(printed.read()[-6000:])
                raise subprocess.CalledProcessError(done.returncode, command)
        for line in into.read_text(encoding="utf-8").splitlines():
            yield Outcome(**json.loads(line))


def results(backend: str, only: str = "") -> list[tuple[Pass, Outcome]]:
    """The last outcome of each test on ``backend``, with the pass that it is of."""
    last: dict[str, tuple[Pass, Outcome]] = {}
    for one in PASSES[backend]:
        again = [test for test, (_, outcome) in last.items() if outcome.status == "skipped"]
        wanted = only if not last else f"^({'|'.join(again)})$"
        for outcome in _outcomes(one, wanted) if again or not last else ():
            if outcome.test not in last or outcome.status != "skipped":
                last[outcome.test] = one, outcome
    return list(last.values())


def summary(found: Sequence[Outcome]) -> dict[str, Any]:
    """Counts; failed and skipped tests by their reason."""
    by_status = {status: [outcome for outcome in found if outcome.status == status] for status in _STATUSES}
    skipped: dict[str, list[str]] = {}
    for outcome in by_status["skipped"]:
        skipped.setdefault(outcome.reason, []).append(outcome.test)
    return {
        **{status: len(outcomes) for status, outcomes in by_status.items()},
        "failures": {outcome.test: outcome.reason.splitlines()[-1] for outcome in by_status["failed"]},
        "skips": dict(sorted(skipped.items(), key=lambda entry: -len(entry[1]))),
        "seconds": round(sum(outcome.seconds for outcome in found)),
    }


def _by_pass(found: Sequence[tuple[Pass, Outcome]]) -> dict[str, int]:
    """Number of tests that passed in each pass."""
    return {
        f"selected as {one.selected_as}, {one.ranks} ranks": sum(
            of == one and outcome.status == "passed" for of, outcome in found
        )
        for one in dict.fromkeys(one for one, _ in found)
    }


_STATUSES = ("passed", "failed", "skipped")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and, if asked, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="tests whose name matches (default: all)")
    parser.add_argument("--backends", nargs="+", choices=list(PASSES), default=list(PASSES))
    parser.add_argument("--write", type=Path, metavar="FILE", help="record the counts and reasons as JSON")
    parser.add_argument("--pass-on", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.pass_on:
        _run_pass(chosen.pass_on, chosen.only, chosen.into)
        return 0
    suites = {}
    for backend in chosen.backends:
        found = results(backend, chosen.only)
        suites[backend] = {**summary([outcome for _, outcome in found]), "passed_of_pass": _by_pass(found)}
        for _, outcome in found:
            if outcome.status == "failed":
                print(f"{backend}: {outcome.test} failed\n{outcome.reason}\n")
        print(backend, *(f"{suites[backend][status]} {status}" for status in _STATUSES), flush=True)
    if chosen.write:
        record(chosen.write, "tools.torch_suite", suites)
    return int(bool(suites.get("elastic", {}).get("failed")))


def record(path: Path, module: str, suites: dict[str, Any]) -> None:
    """Write the figures of ``module`` with the machine that they are of."""
    from tools.bench._common import machine

    kept = {"command": f"python -m {module}", "suites": suites, "machine": asdict(machine())}
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
