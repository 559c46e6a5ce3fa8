"""Run PyTorch's tests of process groups that change on backend ``elastic``, and on gloo beside it.

    python -m tools.fault_tolerance_suite FILE [--only REGEX] [--repeats N]
        [--write docs/measured/fault_tolerance_suite.json]

``FILE`` is ``test/distributed/test_c10d_fault_tolerance.py`` of PyTorch's repository, unchanged: wheels do not have it.
Its tests need torch 2.14 or later (``python -m tools.versions --torch VERSION`` makes an environment).
The file names its backends in a list; here its abstract class becomes a test case of one backend.

Invariants: ranks are forked, since a fresh interpreter would not find the class; each pass is a process of its own.
The record has the file's SHA-256. The exit code is 1 if a test fails on ``elastic``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.suites import Outcome, outcomes, parser, record, run_tests, told

__all__ = ["BACKENDS", "results"]

BACKENDS = ("elastic", "gloo")
TEST_SECONDS = 120
"""A test that takes longer has failed. A reconfiguration has 30 s."""


def _suite(source: Path, backend: str) -> type[unittest.TestCase]:
    """Return the tests of the file ``source``, whose ranks are forked and run on ``backend``."""
    import torch.multiprocessing
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class FaultToleranceTest(module.AbstractFaultToleranceTest, MultiProcessTestCase):  # type: ignore[misc]
        backend_name = backend
        device = device_type = "cpu"  # releases ask for one of them
        supports_work_result = False  # of 2.15: results of work on CUDA streams

        def _spawn_processes(self) -> None:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return FaultToleranceTest


def _run_pass(source: Path, backend: str, only: str, into: Path) -> None:
    """Run the tests that match."""
    case = _suite(source, backend)
    names = (test for test in unittest.TestLoader().getTestCaseNames(case) if re.search(only, test))
    run_tests(((test, case(test)) for test in names), into)


def results(source: Path, backend: str, only: str = "", kept: Path | None = None, repeats: int = 0) -> list[Outcome]:
    """Run the tests of the file ``source``. Raises ``CalledProcessError`` if the process fails."""
    variables = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_SECONDS), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    arguments = [str(source), "--pass-on", backend, "--only", only]
    lines = kept / f"{source.stem}-{backend}.jsonl" if kept else None
    return outcomes("tools.fault_tolerance_suite", arguments, variables, lines, repeats)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and, if asked, record."""
    flags = parser(__doc__ or "")
    flags.add_argument("source", type=Path, metavar="FILE", help="the file of tests of the installed release")
    chosen = flags.parse_args(arguments)
    source = chosen.source.resolve()
    if not source.is_file():
        print(f"error: {source} is no file; take it from PyTorch's repository", file=sys.stderr)
        return 1
    if chosen.pass_on:
        _run_pass(source, chosen.pass_on, chosen.only, chosen.into)
        return 0
    suites = {}
    for backend in BACKENDS:
        found = results(source, backend, chosen.only, chosen.kept, chosen.repeats)
        suites[backend] = told(backend, found, chosen.repeats)
    if chosen.write:
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        record(chosen.write, "tools.fault_tolerance_suite", suites, source_sha256=digest)
    return int(bool(suites["elastic"]["failed"]))


if __name__ == "__main__":
    sys.exit(main())
