"""Run torchft's own tests on ``ProcessGroupElastic``, and on its process group over gloo beside it.

    python -m tools.torchft_suite [--only REGEX] [--repeats N] [--kept DIR]
        [--write docs/measured/torchft_suite.json]

The tests are those of torchft's wheel, unchanged: integration of its manager, LocalSGD and DiLoCo with its own
lighthouse, process groups. They and their helpers name the class ``ProcessGroupGloo``; on ``elastic`` the name leads to
ours in every module of torchft, and a group of the class itself fails when it is configured. Where DiLoCo's tests
compare with recorded parameters, which the wheel does not have, gloo's pass records them.

Invariants: torchft and its requirements (``requirements/torchft.txt``) go to a folder of their own, so the environment
that trains does not have them. Each pass is a process of its own. The exit code is 1 if a test fails on ``elastic``.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tools.suites import ROOT, Outcome, outcomes, parser, record, run_tests, told

__all__ = ["BACKENDS", "install", "results", "run"]

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


def _put_ours_in_place_of_gloo() -> None:
    """Make ``ProcessGroupGloo`` lead to ours in all modules of torchft that are loaded."""
    from torchft.process_group import ProcessGroupGloo

    from megatron.elastic.comm.torchft_group import ProcessGroupElastic

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torchft" and getattr(module, "ProcessGroupGloo", None) is ProcessGroupGloo:
            setattr(module, "ProcessGroupGloo", ProcessGroupElastic)  # noqa: B010 - a module that mypy does not know
    ProcessGroupGloo.configure = _not_ours


def _not_ours(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a test on elastic used torchft's group over gloo")


def _tests(backend: str) -> Iterator[unittest.TestCase]:
    modules = [importlib.import_module(f"torchft.{name}") for name in MODULES]
    if backend == "elastic":
        _put_ours_in_place_of_gloo()
    for module in modules:
        for case in unittest.TestLoader().loadTestsFromModule(module):
            yield from (test for test in case if isinstance(test, unittest.TestCase))  # type: ignore[union-attr]


def _run_pass(backend: str, only: str, into: Path) -> None:
    named = ((test.id().removeprefix("torchft."), test) for test in _tests(backend))
    wanted = ((name, test) for name, test in named if not OTHERS.search(name) and re.search(only, name))
    run_tests(((name, unittest.TestSuite([test])) for name, test in wanted), into)
    os._exit(0)  # torchft's servers have threads that do not end


def results(backend: str, packages: Path, only: str = "", kept: Path | None = None, repeats: int = 0) -> list[Outcome]:
    """Run the tests on ``backend``. Raises ``CalledProcessError`` if the process fails."""
    variables = {
        "PYTHONPATH": f"{ROOT}:{packages}",
        "WRITE_FIXTURE": "true" if backend == BACKENDS[0] else "false",
        "PYTHONHASHSEED": "0",  # names of tests of collectives have the order of a set in them
    }
    lines = kept / f"torchft-{backend}.jsonl" if kept else None
    return outcomes("tools.torchft_suite", ["--pass-on", backend, "--only", only], variables, lines, repeats)


def run(packages: Path, only: str = "", kept: Path | None = None, repeats: int = 0) -> dict[str, dict[str, Any]]:
    """Run all passes and print the failures; counts and reasons, by backend."""
    return {backend: told(backend, results(backend, packages, only, kept, repeats), repeats) for backend in BACKENDS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and, if asked, record."""
    flags = parser(__doc__ or "")
    flags.add_argument("--packages", type=Path, metavar="DIR", help="a folder with torchft (default: install it)")
    chosen = flags.parse_args(arguments)
    if chosen.pass_on:
        _run_pass(chosen.pass_on, chosen.only, chosen.into)
    with tempfile.TemporaryDirectory() as folder:
        suites = run(chosen.packages or install(Path(folder)), chosen.only, chosen.kept, chosen.repeats)
    if chosen.write:
        record(chosen.write, "tools.torchft_suite", suites)
    return int(bool(suites["elastic"]["failed"]))


if __name__ == "__main__":
    sys.exit(main())
