"""Outcomes of other projects' tests on our process groups: one pass, its counts, and their record.

A pass runs the tests of one backend in a process of its own, which writes one JSON line a test. Where the lines are
kept (``--kept``), an interrupted run goes on after them; tests that failed run again. A record has one run for each
release of torch; a new run replaces that of its release only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from tools.bench._common import machine

__all__ = ["ROOT", "STATUSES", "Outcome", "outcome_of", "outcomes", "parser", "record", "run_tests", "summary", "told"]

ROOT = Path(__file__).resolve().parents[1]
STATUSES = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Outcome:
    """The end of one test: ``passed``, ``failed`` or ``skipped``, the reason of the last two, and seconds."""

    test: str
    status: str
    reason: str
    seconds: float


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
    """Run tests with their names one after the other, but those that passed or were skipped in ``into``; add theirs."""
    ended = {outcome.test: outcome for outcome in _read(into) if outcome.status != "failed"}
    with into.open("w", encoding="utf-8") as lines:
        lines.writelines(_line(outcome) for outcome in ended.values())
        for name, case in tests:
            if name not in ended:
                lines.write(_line(outcome_of(case, name)))
                lines.flush()


def _line(outcome: Outcome) -> str:
    return json.dumps(asdict(outcome)) + "\n"


def _read(path: Path) -> list[Outcome]:
    """Return the outcomes in the file; a last line without its end does not count."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [Outcome(**json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


# -- all passes ----------------------------------------------------------------


def outcomes(
    module: str, arguments: Sequence[str], variables: Mapping[str, str], kept: Path | None = None
) -> list[Outcome]:
    """Return what the pass ``python -m module`` writes under further environment ``variables``.

    ``kept``: the file that it goes on with. Raises ``CalledProcessError`` if its process fails; the end of what it
    printed goes to stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        into, log = kept or Path(folder) / "outcomes", Path(folder) / "printed"
        into.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", module, *arguments, "--into", str(into.resolve())]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        with log.open("w", encoding="utf-8") as printed:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT, check=False
            )
        if done.returncode:
            sys.stderr.write(log.read_text(encoding="utf-8", errors="replace")[-6000:])
            raise subprocess.CalledProcessError(done.returncode, command)
        return _read(into)


def summary(found: Sequence[Outcome]) -> dict[str, Any]:
    """Counts; failed and skipped tests by their reason."""
    by_status = {status: [outcome for outcome in found if outcome.status == status] for status in STATUSES}
    skipped: dict[str, list[str]] = {}
    for outcome in by_status["skipped"]:
        skipped.setdefault(outcome.reason, []).append(outcome.test)
    return {
        **{status: len(of_it) for status, of_it in by_status.items()},
        "failures": {outcome.test: outcome.reason.splitlines()[-1] for outcome in by_status["failed"]},
        "skips": dict(sorted(skipped.items(), key=lambda entry: -len(entry[1]))),
        "seconds": round(sum(outcome.seconds for outcome in found)),
    }


def told(backend: str, found: Sequence[Outcome]) -> dict[str, Any]:
    """Print failures and counts of ``backend``; return its summary."""
    for outcome in found:
        if outcome.status == "failed":
            print(f"{backend}: {outcome.test} failed\n{outcome.reason}\n")
    counts = summary(found)
    print(backend, *(f"{counts[status]} {status}" for status in STATUSES), flush=True)
    return counts


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the flags that all suites have."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", default="", metavar="REGEX", help="tests whose name matches (default: all)")
    flags.add_argument("--write", type=Path, metavar="FILE", help="record counts and reasons in this JSON file")
    flags.add_argument(
        "--kept", type=Path, metavar="DIR", help="go on with an interrupted run, whose outcomes are here"
    )
    flags.add_argument("--pass-on", help=argparse.SUPPRESS)
    flags.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    return flags


def record(path: Path, module: str, suites: Mapping[str, Any], **facts: str) -> None:
    """Put the run of ``module`` under the installed torch into the file; ``suites``: the counts of each backend."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    run = {"suites": suites, **facts, "machine": asdict(machine()), "date": date.today().isoformat()}
    runs = {**before.get("runs", {}), torch.__version__: run}
    kept = {"command": f"python -m {module}", "runs": dict(sorted(runs.items()))}
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
