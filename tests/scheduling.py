"""Order and place of the tests in a run of several processes (pytest-xdist), and a list of the unstable ones.

Training jobs fill the cores for tens of seconds and have time-outs. So there is one worker more than cores, and it
takes unit tests alone: no more jobs run at once than there are cores. Tests of a file whose fixtures are made once a
module run in one worker, one after the other; they are the longest, and come first.

A plugin of the ``conftest.py`` beside ``tests/``; without xdist only the time-outs apply.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

JOBS = ("tests/integration/", "tests/chaos/")
"""Folders whose tests start jobs of several processes."""
SLOW_SECONDS = 7200
"""Time-out of a slow test; that of the others is in ``pyproject.toml``."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests a time-out of their own."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


@functools.cache
def stays_together(file: Path) -> bool:
    """True if fixtures of ``file`` are made once a module."""
    return file.is_file() and 'scope="module"' in file.read_text(encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any | None:
    """Return the scheduler of ``--dist loadscope``."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class JobsFirst(LoadScopeScheduling):
        """All workers but the last take jobs and then unit tests; the last takes unit tests alone.

        At least two take jobs. A unit of work is a test, or a whole file that stays together.
        """

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if stays_together(config.rootpath / file) else nodeid

        def _next(self, node: Any) -> str | None:
            """Return the unit that ``node`` takes next, ``None`` if there is none for it."""
            # By its place, not its name: the others move up when a worker has crashed.
            takes_jobs = self.nodes.index(node) < max(2, self.numnodes - 1)
            units = [unit for unit in self.workqueue if takes_jobs or not unit.startswith(JOBS)]
            return min(units, key=lambda unit: (unit.startswith(JOBS) is not takes_jobs, "::" in unit), default=None)

        def _assign_work_unit(self, node: Any) -> None:
            unit = self._next(node)
            if unit is None:
                node.shutdown()
                return
            self.workqueue.move_to_end(unit, last=False)
            super()._assign_work_unit(node)

    return JobsFirst(config, log)


def unstable(stats: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Return how each test failed that passed when it was run again, by the test's name."""
    passed = {str(report.nodeid) for report in stats.get("passed", ())}
    failures = {str(report.nodeid): report.longreprtext for report in stats.get("rerun", ())}
    return {name: failure for name, failure in sorted(failures.items()) if name in passed}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the unstable tests and their failures."""
    for name, failure in unstable(terminalreporter.stats).items():
        terminalreporter.section(f"UNSTABLE {name}: failed once, passed when it was run again")
        terminalreporter.write_line(failure)
