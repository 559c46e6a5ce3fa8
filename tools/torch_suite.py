"""Run PyTorch's own distributed tests on backend ``elastic``, and on gloo beside it.

    python -m tools.torch_suite [--only REGEX] [--kept DIR] [--write docs/measured/torch_suite.json]

The tests are those of the installed torch (``torch.testing._internal.distributed.distributed_test``), unchanged. Many
of them name the backends that they run for. So a pass imports the suite as one of these backends would, and then its
ranks run on the backend that is under test. ``elastic`` takes the tests of gloo, with 4 ranks; of those that this
skips, the ones that ask for 8 ranks; and then those reserved to MPI, which are the all-to-all tests on the CPU. gloo
takes the first two passes.

Invariants: ranks are forked, since a fresh interpreter takes seconds to import torch; each pass is a process of its
own, because the suite reads its backend when it is imported. The exit code is 1 if a test fails on ``elastic``.
"""

from __future__ import annotations

import re
import sys
import tempfile
import unittest
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.suites import Outcome, outcomes, parser, record, run_tests, told

__all__ = ["PASSES", "Pass", "results"]

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


# -- one pass, in a process of its own -----------------------------------------


class _Alias(str):
    """The name of a backend that also equals the name of another one, whose tests it takes.

    Tests compare both: the name of a group with the suite's, and the suite's with those that they know.
    """

    def __new__(cls, name: str, other: str) -> _Alias:
        alias = super().__new__(cls, name)
        alias.other = other
        return alias

    other: str

    def __eq__(self, name: object) -> bool:
        return str(self) == name or self.other == name

    def __ne__(self, name: object) -> bool:
        return not self == name

    __hash__ = str.__hash__


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

        def run_test(self, test_name: str, parent_pipe: Any) -> None:
            suite.BACKEND = _Alias(backend, selected_as)  # the group has been made by its own name
            super().run_test(test_name, parent_pipe)

    selected_as = suite.BACKEND
    assert issubclass(DistributedTest, MultiProcessTestCase)
    return DistributedTest


def _run_pass(backend: str, only: str, into: Path) -> None:
    """Run the tests that match."""
    case = _suite(backend)
    names = (test for test in unittest.TestLoader().getTestCaseNames(case) if re.search(only, test))
    run_tests(((test, case(test)) for test in names), into)


# -- all passes ----------------------------------------------------------------


def _outcomes(one: Pass, only: str, kept: Path | None, repeats: int) -> list[Outcome]:
    """Run a pass, or go on with it in the folder ``kept``. Raises ``CalledProcessError`` if its process fails."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "BACKEND": one.selected_as,
            "WORLD_SIZE": str(one.ranks),
            "TEMP_DIR": folder,
            "INIT_METHOD": f"file://{folder}/shared_init_file",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_SECONDS),
            "TORCH_CPP_LOG_LEVEL": "FATAL",
        }
        lines = kept / f"{one.backend}-{one.selected_as}-{one.ranks}.jsonl" if kept else None
        arguments = ["--pass-on", one.backend, "--only", only]
        return outcomes("tools.torch_suite", arguments, variables, lines, repeats)


def results(backend: str, only: str = "", kept: Path | None = None, repeats: int = 0) -> list[tuple[Pass, Outcome]]:
    """The last outcome of each test on ``backend``, with the pass that it is of."""
    last: dict[str, tuple[Pass, Outcome]] = {}
    for one in PASSES[backend]:
        again = [test for test, (_, outcome) in last.items() if outcome.status == "skipped"]
        wanted = only if not last else f"^({'|'.join(again)})$"
        for outcome in _outcomes(one, wanted, kept, repeats) if again or not last else ():
            if outcome.test not in last or outcome.status != "skipped":
                last[outcome.test] = one, outcome
    return list(last.values())


def _by_pass(found: Sequence[tuple[Pass, Outcome]]) -> dict[str, int]:
    """Number of tests that passed in each pass."""
    return {
        f"selected as {one.selected_as}, {one.ranks} ranks": sum(
            of == one and outcome.status == "passed" for of, outcome in found
        )
        for one in dict.fromkeys(one for one, _ in found)
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and, if asked, record."""
    flags = parser(__doc__ or "")
    flags.add_argument("--backends", nargs="+", choices=list(PASSES), default=list(PASSES))
    chosen = flags.parse_args(arguments)
    if chosen.pass_on:
        _run_pass(chosen.pass_on, chosen.only, chosen.into)
        return 0
    suites = {}
    for backend in chosen.backends:
        found = results(backend, chosen.only, chosen.kept, chosen.repeats)
        counts = told(backend, [outcome for _, outcome in found], chosen.repeats)
        suites[backend] = {**counts, "passed_of_pass": _by_pass(found)}
    if chosen.write:
        record(chosen.write, "tools.torch_suite", suites)
    return int(bool(suites.get("elastic", {}).get("failed")))


if __name__ == "__main__":
    sys.exit(main())
