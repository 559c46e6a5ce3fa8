"""Records of other projects' tests tell what passed, what failed and why tests were skipped, by release of torch."""

from __future__ import annotations

import json
import subprocess
import unittest
from pathlib import Path

import pytest
import torch

from tools import fault_tolerance_suite, suite_tables
from tools.suites import Outcome, outcome_of, outcomes, record, run_tests, summary


def ran() -> list[Outcome]:
    class Case(unittest.TestCase):  # in a function, where pytest does not collect it
        def test_adds(self) -> None:
            assert sum((1, 1)) == 2

        def test_differs(self) -> None:
            raise AssertionError("1 is not 2")

        @unittest.skip("needs a GPU")
        def test_left_out(self) -> None: ...

    return [outcome_of(Case(name), name) for name in ("test_adds", "test_differs", "test_left_out")]


def test_an_interrupted_run_goes_on_and_runs_again_what_failed(tmp_path: Path) -> None:
    into, began = tmp_path / "outcomes", []

    class Case(unittest.TestCase):
        def test_adds(self) -> None:
            began.append("adds")

        def test_recovers(self) -> None:
            began.append("recovers")
            assert began.count("recovers") > 1

    tests = [(name, Case(name)) for name in ("test_adds", "test_recovers")]
    run_tests(tests, into)
    with into.open("a", encoding="utf-8") as lines:
        lines.write('{"test": "test_int')  # the process was killed while it wrote
    run_tests(tests, into)
    assert began == ["adds", "recovers", "recovers"]
    statuses = [json.loads(line)["status"] for line in into.read_text(encoding="utf-8").splitlines()]
    assert statuses == ["passed", "passed"]


def test_an_outcome_has_its_status_and_reason() -> None:
    passed, failed, skipped = ran()
    assert (passed.status, passed.reason) == ("passed", "")
    assert failed.status == "failed" and failed.reason.endswith("AssertionError: 1 is not 2")
    assert (skipped.status, skipped.reason) == ("skipped", "needs a GPU")


def test_a_run_replaces_that_of_its_torch_only(tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    path.write_text(json.dumps({"runs": {"9.0": {"suites": {}}, torch.__version__: {"suites": {"old": {}}}}}))
    record(path, "tools.torch_suite", {"elastic": summary(ran())}, source_sha256="12")
    runs = json.loads(path.read_text())["runs"]
    assert runs["9.0"] == {"suites": {}}
    here = runs[torch.__version__]
    assert here["source_sha256"] == "12" and here["suites"].keys() == {"elastic"}
    assert here["suites"]["elastic"]["failures"] == {"test_differs": "AssertionError: 1 is not 2"}


def test_the_table_names_failures_and_counts_skips_by_reason() -> None:
    suites = {"elastic": summary(ran()), "gloo": summary(ran()[:1])}
    lines = suite_tables.counts_and_reasons({"runs": {"2.0": {"suites": suites}}}).splitlines()
    assert "| 2.0 | elastic | 1 | 1 (`test_differs`) | 1 |" in lines
    assert "| 2.0 | gloo | 1 | 0 | 0 |" in lines
    assert lines[-1] == "| needs a GPU | 1 | 0 |"


def test_a_pass_that_dies_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        outcomes("tools.suites_that_are_not_there", [], {})
    assert "suites_that_are_not_there" in capsys.readouterr().err


def test_a_missing_file_of_tests_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fault_tolerance_suite.main([str(tmp_path / "absent.py")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
