"""Outcomes of other projects' tests on our process groups: one pass, its counts, and their record.

A pass runs the tests of one backend in a process of its own, which writes one JSON line for each run of a test. With
``--repeats`` a test that failed runs again after its pass, in a process without other tests. Where the lines are kept
(``--kept``), an interrupted run goes on after them. A record has one run for each release of torch; a new run replaces
that of its release only.

Invariant: no failure disappears. A test that failed and passed later counts as ``passed when repeated``, with the
reasons of its failures, also where the failure is of a run that was interrupted.
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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.bench._common import machine

__all__ = [
    "REPEATED",
    "ROOT",
    "STATUSES",
    "Outcome",
    "in_all",
    "outcome_of",
    "outcomes",
    "parser",
    "record",
    "run_tests",
    "summary",
    "told",
]

ROOT = Path(__file__).resolve().parents[1]
REPEATED = "passed when repeated"
STATUSES = ("passed", REPEATED, "failed", "skipped")


@dataclass(frozen=True)
class Outcome:
    """The end of one test, and the seconds of all its runs.

    ``status`` is one of ``STATUSES``; a single run never has ``REPEATED``. ``reason`` is why the test was skipped or
    first failed. :func:`in_all` gives the reasons of all its failures.
    """

    test: str
    status: str
    reason: str
    seconds: float
    failures: tuple[str, ...] = ()


# -- one pass, in a process of its own -----------------------------------------


def outcome_of(case: unittest.TestCase | unittest.TestSuite, test: str) -> Outcome:
    """Run a test, which is called ``test``."""
    began, found = time.monotonic(), unittest.TestResult()
    case.run(found)
    wrong = [*found.failures, *found.errors]
    status = "failed" if wrong else "skipped" if found.skipped else "passed"
    reason = next((why for _, why in wrong or found.skipped), "")
    return Outcome(test, status, reason.strip(), round(time.monotonic() - began, 1))


def run_tests(tests: Iterable[tuple[str, unittest.TestCase | unittest.TestSuite]], into: Path) -> None:
    """Run tests with their names one after the other, but those that have run already in ``into``; add theirs."""
    before = _read(into)
    ended = {outcome.test for outcome in before}
    with into.open("w", encoding="utf-8") as lines:  # anew: the last line may lack its end
        lines.writelines(_line(outcome) for outcome in before)
        for name, case in tests:
            if name not in ended:
                lines.write(_line(outcome_of(case, name)))
                lines.flush()


def _line(outcome: Outcome) -> str:
    facts = asdict(outcome)
    del facts["failures"]  # a line is one run
    return json.dumps(facts) + "\n"


def _read(path: Path) -> list[Outcome]:
    """Return the runs in the file; a last line without its end does not count."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [Outcome(**json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def in_all(runs: Iterable[Outcome]) -> list[Outcome]:
    """Return one outcome a test from all its runs, in the order of the first ones.

    A test that failed has passed when repeated if its last run passed; a repeat that was skipped does not pass.
    """
    by_test: dict[str, list[Outcome]] = {}
    for run in runs:
        by_test.setdefault(run.test, []).append(run)
    return [_in_all(of_it) for of_it in by_test.values()]


def _in_all(runs: Sequence[Outcome]) -> Outcome:
    first, failures = runs[0], tuple(run.reason for run in runs if run.status == "failed")
    if not failures:
        return first
    status = REPEATED if runs[-1].status == "passed" else "failed"
    return replace(first, status=status, seconds=round(sum(run.seconds for run in runs), 1), failures=failures)


# -- all passes ----------------------------------------------------------------


def outcomes(
    module: str,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    kept: Path | None = None,
    repeats: int = 0,
) -> list[Outcome]:
    """Return what the pass ``python -m module`` writes under further environment ``variables``.

    A test that fails runs again alone until it passes, at most ``repeats`` times. ``kept``: the file that the pass goes
    on with. Raises ``CalledProcessError`` if a process fails; the end of what it printed goes to stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        into = kept or Path(folder) / "outcomes"
        into.parent.mkdir(parents=True, exist_ok=True)
        _run_module(module, arguments, variables, into)
        runs = _read(into)
        times = Counter(run.test for run in runs)
        for outcome in in_all(runs):
            left = 1 + repeats - times[outcome.test]
            if outcome.status == "failed" and left > 0:
                alone = [*arguments, "--only", f"^{re.escape(outcome.test)}$"]
                _repeat(partial(_run_module, module, alone, variables), left, into)
        return in_all(_read(into))


def _repeat(run: Callable[[Path], None], times: int, into: Path) -> None:
    """Run one test alone until it passes, at most ``times`` times; add its runs to the lines in ``into``."""
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            alone = Path(folder) / "outcomes"
            run(alone)
            (outcome,) = _read(alone)
        with into.open("a", encoding="utf-8") as lines:
            lines.write(_line(outcome))
        if outcome.status == "passed":
            return


def _run_module(module: str, arguments: Sequence[str], variables: Mapping[str, str], into: Path) -> None:
    """Run a pass that writes to ``into``. Raises ``CalledProcessError`` if its process fails."""
    command = [sys.executable, "-m", module, *arguments, "--into", str(into.resolve())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            printed.seek(0)
            sys.stderr.write(printed.read()[-6000:])
            raise subprocess.CalledProcessError(done.returncode, command)


def summary(found: Sequence[Outcome], repeats: int) -> dict[str, Any]:
    """Counts; failed and skipped tests by their reason; all failures of the tests that passed when repeated."""
    by_status = {status: [outcome for outcome in found if outcome.status == status] for status in STATUSES}
    skipped: dict[str, list[str]] = {}
    for outcome in by_status["skipped"]:
        skipped.setdefault(outcome.reason, []).append(outcome.test)
    return {
        **{status.replace(" ", "_"): len(of_it) for status, of_it in by_status.items()},
        "repeats": repeats,
        "failures": {outcome.test: _last_line(outcome.reason) for outcome in by_status["failed"]},
        "failures_before_passing": {
            outcome.test: [_last_line(reason) for reason in outcome.failures] for outcome in by_status[REPEATED]
        },
        "skips": dict(sorted(skipped.items(), key=lambda entry: -len(entry[1]))),
        "seconds": round(sum(outcome.seconds for outcome in found)),
    }


def _last_line(reason: str) -> str:
    return reason.splitlines()[-1]


def told(backend: str, found: Sequence[Outcome], repeats: int) -> dict[str, Any]:
    """Print all failures, and the counts of ``backend``; return its summary."""
    for outcome in found:
        if outcome.status in ("failed", REPEATED):
            reasons = "\n\n".join(outcome.failures)
            print(f"{backend}: {outcome.test} {outcome.status}\n{reasons}\n")
    counts = [f"{sum(outcome.status == status for outcome in found)} {status}" for status in STATUSES]
    print(f"{backend}: {', '.join(counts)}", flush=True)
    return summary(found, repeats)


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the flags that all suites have."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", default="", metavar="REGEX", help="tests whose name matches (default: all)")
    flags.add_argument(
        "--repeats",
        type=_count,
        default=0,
        metavar="N",
        help="run a test that failed again up to N times, without other tests, on every backend (default: 0)",
    )
    flags.add_argument("--write", type=Path, metavar="FILE", help="record counts and reasons in this JSON file")
    flags.add_argument(
        "--kept", type=Path, metavar="DIR", help="go on with an interrupted run, whose outcomes are here"
    )
    flags.add_argument("--pass-on", help=argparse.SUPPRESS)
    flags.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    return flags


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of repeats: give 0 or more")
    return int(text)


def record(path: Path, module: str, suites: Mapping[str, Any], **facts: str) -> None:
    """Put the run of ``module`` under the installed torch into the file; ``suites``: the counts of each backend."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    run = {"suites": suites, **facts, "machine": asdict(machine()), "date": date.today().isoformat()}
    runs = {**before.get("runs", {}), torch.__version__: run}
    kept = {"command": f"python -m {module}", "runs": dict(sorted(runs.items()))}
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
