"""Tables of docs/benchmarks.md about other projects' tests: counts by torch and backend, and why tests were skipped.

The figures are records of :mod:`tools.suites`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["counts", "counts_and_reasons"]


def counts(figures: Mapping[str, Any]) -> str:
    """Return one line for each torch and backend, failed tests by name.

    A dash for passed when repeated: failed tests were not repeated.
    """
    lines = ["| torch | backend | passed | passed when repeated | failed | skipped |", "|---|---|---|---|---|---|"]
    for torch, run in figures["runs"].items():
        for backend, suite in run["suites"].items():
            repeated = _named(suite["failures_before_passing"]) if suite.get("repeats") else "-"
            failed = _named(suite["failures"])
            lines.append(f"| {torch} | {backend} | {suite['passed']} | {repeated} | {failed} | {suite['skipped']} |")
    return "\n".join(lines)


def _named(tests: Collection[str]) -> str:
    """Return the number of tests, and their names."""
    names = ", ".join(f"`{test}`" for test in tests)
    return f"{len(tests)} ({names})" if names else "0"


def counts_and_reasons(figures: Mapping[str, Any]) -> str:
    """Return :func:`counts`, then one line for each reason of a skip: the number of tests in each column."""
    columns = {
        f"{torch}, {backend}": suite["skips"]
        for torch, run in figures["runs"].items()
        for backend, suite in run["suites"].items()
    }
    reasons = {reason: None for skips in columns.values() for reason in skips}
    if not reasons:
        return counts(figures)
    lines = [f"| tests skipped because | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for reason in sorted(reasons, key=lambda reason: -sum(len(skips.get(reason, ())) for skips in columns.values())):
        cells = [str(len(skips.get(reason, ()))) for skips in columns.values()]
        lines.append(f"| {_words(reason)} | {' | '.join(cells)} |")
    return "\n".join([counts(figures), "", *lines])


def _words(reason: str) -> str:
    return " ".join(reason.split()).replace("|", "\\|")
