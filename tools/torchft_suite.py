"""Run torchft's own tests on ``ProcessGroupElastic``, and on its process group over gloo beside it.

    python -m tools.torchft_suite [--packages DIR] [--only REGEX] [--write docs/measured/torchft_suite.json]

The tests are those of torchft's wheel, unchanged: integration of its manager, LocalSGD and DiLoCo with its own
lighthouse, process groups. They name the class ``ProcessGroupGloo``; on ``elastic`` the name leads to ours. Where
DiLoCo's tests compare with recorded parameters, which the wheel does not have, gloo's pass records them.

Invariants: torchft and its requirements (``requirements/torchft.txt``) go to a folder of their own, so the environment
that trains does not have them. Each pass is a process of its own. The exit code is 1 if a test fails on ``elastic``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.torch_suite import ROOT, Outcome, outcome_of, record, summary

__all__ = ["BACKENDS", "install", "results"]

MODULES = (
    "manager_integ_test",
    "local_sgd_integ_test",
    "local_sgd_test",
    "diloco_regression_test",
    "process_group_test",
    "lighthouse_test",
)
OTHERS = re.compile(r"[Bb]aby|[Nn]ccl|torchcomms|CreateStoreClient|_dummy|swallowing|managed_process|_wrapper")
"""Tests of torchft's other process groups."""
BACKENDS = ("gloo", "elastic")
"""In this order: the first one records."""


def install(folder: Path) -> Path:
    """Install torchft into ``folder``, without torch. Raises ``CalledProcessError``."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, "-r", str(ROOT / "requirements" / "torchft.txt")], check=True)
    (folder / "test_fixtures").mkdir(exist_ok=True)
    return folder


def _tests(backend: str) -> Iterator[unittest.TestCase]:
    for name in MODULES:
        module = importlib.import_module(f"torchft.{name}")
        if backend == "elastic" and hasattr(module, "ProcessGroupGloo"):
            from megatron.elastic.comm.torchft_group import ProcessGroupElastic

            setattr(module, "ProcessGroupGloo", ProcessGroupElastic)  # noqa: B010 - a module that mypy does not know
        for case in unittest.TestLoader().loadTestsFromModule(module):
            yield from (test for test in case if isinstance(test, unittest.TestCase))  # type: ignore[union-attr]


def _run_pass(backend: str, only: str, into: Path) -> None:
    with into.open("w", encoding="utf-8") as lines:
        for test in _tests(backend):
            name = test.id().removeprefix("torchft.")
            if OTHERS.search(name) or not re.search(only, name):
                continue
            lines.write(json.dumps(asdict(outcome_of(unittest.TestSuite([test]), name))) + "\n")
            lines.flush()
    os._exit(0)  # torchft's servers have threads that do not end


def results(backend: str, packages: Path, only: str = "") -> list[Outcome]:
    """Run the tests on ``backend``. Raises ``CalledProcessError`` if the process fails."""
    with tempfile.TemporaryDirectory() as folder:
        into, log = Path(folder) / "outcomes", Path(folder) / "log"
        command = [sys.executable, "-m", "tools.torchft_suite", "--pass-on", backend, "--only", only]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{packages}",
            "OMP_NUM_THREADS": "1",
            "WRITE_FIXTURE": "true" if backend == BACKENDS[0] else "false",
        }
        with log.open("w", encoding="utf-8") as printed:
            done = subprocess.run(
                [*command, "--into", str(into)], cwd=ROOT, env=environment, stdout=printed, stderr=printed, check=False
            )
        if done.returncode:
            sys.stderr.write(log.read_text(encoding="utf-8")[-6000:])
            raise subprocess.CalledProcessError(done.returncode, command)
        return [Outcome(**json.loads(line)) for line in into.read_text(encoding="utf-8").splitlines()]


def run(packages: Path, only: str = "") -> dict[str, dict[str, Any]]:
    """Run all passes and print the failures; counts and reasons, by backend."""
    suites = {}
    for backend in BACKENDS:
        found = results(backend, packages, only)
        suites[backend] = summary(found)
        for outcome in found:
            if outcome.status == "failed":
                print(f"{backend}: {outcome.test} failed\n{outcome.reason}\n")
        print(
            backend, *(f"{suites[backend][status]} {status}" for status in ("passed", "failed", "skipped")), flush=True
        )
    return suites


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and, if asked, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="tests whose name matches (default: all)")
    parser.add_argument("--packages", type=Path, metavar="DIR", help="a folder with torchft (default: install it)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="record the counts and reasons as JSON")
    parser.add_argument("--pass-on", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.pass_on:
        _run_pass(chosen.pass_on, chosen.only, chosen.into)
    with tempfile.TemporaryDirectory() as folder:
        suites = run(chosen.packages or install(Path(folder)), chosen.only)
    if chosen.write:
        record(chosen.write, "tools.torchft_suite", suites)
    return int(bool(suites["elastic"]["failed"]))


if __name__ == "__main__":
    sys.exit(main())
