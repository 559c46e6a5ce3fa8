"""Records of other projects' tests tell what passed, what failed and why tests were skipped, by release of torch."""

from __future__ import annotations

import json
import subprocess
import unittest
from pathlib import Path

import pytest
import torch

from tools import fault_tolerance_suite, suite_tables, torch_suite
from tools.suites import REPEATED, ROOT, STATUSES, Outcome, in_all, outcome_of, outcomes, record, run_tests, summary


def ran() -> list[Outcome]:
    class Case(unittest.TestCase):  # in a function, where pytest does not collect it
        def test_adds(self) -> None:
            assert sum((1, 1)) == 2

        def test_differs(self) -> None:
            raise AssertionError("1 is not 2")

        @unittest.skip("needs a GPU")
        def test_left_out(self) -> None: ...

    return [outcome_of(Case(name), name) for name in ("test_adds", "test_differs", "test_left_out")]


def test_an_interrupted_run_goes_on_and_keeps_what_failed(tmp_path: Path) -> None:
    into, began = tmp_path / "outcomes", []

    class Case(unittest.TestCase):
        def test_adds(self) -> None:
            began.append("adds")

        def test_differs(self) -> None:
            began.append("differs")
            raise AssertionError("1 is not 2")

        def test_last(self) -> None:
            began.append("last")

    tests = [(name, Case(name)) for name in ("test_adds", "test_differs", "test_last")]
    run_tests(tests[:2], into)
    with into.open("a", encoding="utf-8") as lines:
        lines.write('{"test": "test_las')  # the process was killed while it wrote
    run_tests(tests, into)
    assert began == ["adds", "differs", "last"]
    statuses = [json.loads(line)["status"] for line in into.read_text(encoding="utf-8").splitlines()]
    assert statuses == ["passed", "failed", "passed"]


FLAKY = """
import argparse, re, unittest
from pathlib import Path
from tools.suites import run_tests

PASSES_IN_RUN = {{"test_steady": 1, "test_unsteady": 2, "test_late": 4}}
folder = Path({folder!r})


class Case(unittest.TestCase):
    def runTest(self):
        with (folder / "ran").open("a") as ran:
            ran.write(self.name + " " + " ".join(wanted) + "\\n")
        runs = sum(line.split()[0] == self.name for line in (folder / "ran").read_text().splitlines())
        self.assertEqual(runs, PASSES_IN_RUN[self.name], f"run {{runs}}")


flags = argparse.ArgumentParser()
flags.add_argument("--only")
flags.add_argument("--into", type=Path)
chosen = flags.parse_args()
wanted = [name for name in PASSES_IN_RUN if re.search(chosen.only, name)]
cases = []
for name in wanted:
    case = Case()
    case.name = name
    cases.append((name, case))
run_tests(cases, chosen.into)
"""


@pytest.mark.parametrize("kept", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_failed_test_is_repeated_alone_and_told_apart(tmp_path: Path, kept: bool) -> None:
    (tmp_path / "flaky_suite.py").write_text(FLAKY.format(folder=str(tmp_path)))
    lines = tmp_path / "kept" / "lines" if kept else None
    variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    found = outcomes("flaky_suite", ["--only", ""], variables, lines, repeats=2)
    if kept:  # all repeats have been used up: nothing runs again
        assert outcomes("flaky_suite", ["--only", ""], variables, lines, repeats=2) == found
    assert (tmp_path / "ran").read_text().splitlines() == [
        "test_steady test_steady test_unsteady test_late",
        "test_unsteady test_steady test_unsteady test_late",
        "test_late test_steady test_unsteady test_late",
        "test_unsteady test_unsteady",
        "test_late test_late",
        "test_late test_late",
    ]
    counts = summary(found, repeats=2)
    assert [counts[status.replace(" ", "_")] for status in STATUSES] == [1, 1, 1, 0]
    assert list(counts["failures"]) == ["test_late"] and "run 1" in counts["failures"]["test_late"]
    assert [len(reasons) for reasons in counts["failures_before_passing"].values()] == [1]
    assert list(counts["failures_before_passing"]) == ["test_unsteady"]


def test_a_repeat_that_is_skipped_does_not_pass() -> None:
    failed, skipped = Outcome("test", "failed", "1 is not 2", 1.0), Outcome("test", "skipped", "no GPU", 0.5)
    (outcome,) = in_all([failed, skipped])
    assert outcome == Outcome("test", "failed", "1 is not 2", 1.5, ("1 is not 2",))


def test_an_outcome_has_its_status_and_reason() -> None:
    passed, failed, skipped = ran()
    assert (passed.status, passed.reason) == ("passed", "")
    assert failed.status == "failed" and failed.reason.endswith("AssertionError: 1 is not 2")
    assert (skipped.status, skipped.reason) == ("skipped", "needs a GPU")


def test_a_run_replaces_that_of_its_torch_only(tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    path.write_text(json.dumps({"runs": {"9.0": {"suites": {}}, torch.__version__: {"suites": {"old": {}}}}}))
    record(path, "tools.torch_suite", {"elastic": summary(ran(), 0)}, source_sha256="12")
    runs = json.loads(path.read_text())["runs"]
    assert runs["9.0"] == {"suites": {}}
    here = runs[torch.__version__]
    assert here["source_sha256"] == "12" and here["suites"].keys() == {"elastic"}
    assert here["suites"]["elastic"]["failures"] == {"test_differs": "AssertionError: 1 is not 2"}


def test_the_table_names_failures_and_counts_skips_by_reason() -> None:
    again = Outcome("test_adds_late", REPEATED, "1 is not 2", 2.0, ("1 is not 2",))
    suites = {"elastic": summary([*ran(), again], 2), "gloo": summary(ran()[:1], 0)}
    lines = suite_tables.counts_and_reasons({"runs": {"2.0": {"suites": suites}}}).splitlines()
    assert "| 2.0 | elastic | 1 | 1 (`test_adds_late`) | 1 (`test_differs`) | 1 |" in lines
    assert "| 2.0 | gloo | 1 | - | 0 | 0 |" in lines
    assert lines[-1] == "| needs a GPU | 1 | 0 |"


def test_a_pass_that_dies_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        outcomes("tools.suites_that_are_not_there", [], {})
    assert "suites_that_are_not_there" in capsys.readouterr().err


def test_a_number_of_repeats_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        torch_suite.main(["--repeats", "-1"])
    assert "--repeats: '-1' is no number of repeats: give 0 or more" in capsys.readouterr().err


def test_a_missing_file_of_tests_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fault_tolerance_suite.main([str(tmp_path / "absent.py")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
