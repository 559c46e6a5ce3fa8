"""Runs of the cluster before the history checker: what their ranks log must tell one history.

``python -m tests.cluster.history --faults 10000 --seed 0`` draws scripts of kills until so many have struck. It prints
the scenario of each run that fails, shrunk to fewer kills where these fail too, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

from megatron.elastic.engine.inject import KILL_POINTS, RELAY_POINTS
from tests.cluster.checks import check
from tests.cluster.cluster import Cluster, Program, config_of, named, run
from tests.scenario.scenario import Scenario, parse
from tools.history.__main__ import launches
from tools.history.judge import Rules, Verdict, judge
from tools.history.lines import read

__all__ = [
    "ELSEWHERE",
    "Outcome",
    "drawn",
    "findings",
    "judged",
    "outcome",
    "outcomes",
    "rules_of",
    "run_and_judge",
    "shrunk",
]

ELSEWHERE = (
    *("in_setup", "in_save", "save_writing", "save_finish", "save_whole", "save_named", "save_tracked"),
    *RELAY_POINTS,
)
"""Points outside of what a cluster of one process runs, the host's set-up and checkpoints, and those of owners that do
not compute their units: few scripts come to them (``test_recovery.py`` does)."""
RUNS = 50
"""Of one process."""
SEEDS = range(3)
"""Orders of events in which a shrunk script is tried."""


def rules_of(scenario: Scenario) -> Rules:
    """The checker's rules for a job of these settings."""
    config = config_of(scenario)
    return Rules(exact=config.exact, state_mode=config.snapshot == "state")


def judged(folder: Path, rules: Rules) -> Verdict:
    """The verdict on the logs of one job."""
    (lines,) = launches(read(folder)).values()
    return judge(lines, rules)


def findings(cluster: Cluster, folder: Path) -> list[str]:
    """Findings of the checker in the logs of a run. A rank that hangs has ended the run with a ``Deadlock``."""
    return [str(one) for one in judged(folder, rules_of(cluster.scenario)).violations]


def run_and_judge(scenario: Scenario | str) -> Cluster:
    """Run ``scenario``, check what holds after every run, and judge the logs. Raises ``AssertionError``."""
    asked = parse(scenario) if isinstance(scenario, str) else scenario
    with tempfile.TemporaryDirectory(prefix="history") as folder:
        cluster = run(asked, Program(events=Path(folder)))
        check(cluster)
        with named(asked):
            found = findings(cluster, Path(folder))
            assert not found, "\n".join(found)
    return cluster


def drawn(dice: random.Random) -> Scenario:
    """A job of a few ranks with up to three kills, in any order of events; the state has as many copies more."""
    points = [point for point in KILL_POINTS if point not in ELSEWHERE]
    layout = dice.choice(("pp2dp2", "dp3", "dp4", "tp2dp2", "pp4", "pp2dp2"))
    layout = layout if "dp" in layout else f"{layout}dp1"
    ranks, words = parse(layout).layout.ranks, []
    for _ in range(dice.randint(1, min(3, ranks - 1))):
        life = dice.choice((0, 0, 1))
        step = dice.randint(0 if life else 1, 4)
        where = f",step={step}" if step else ""
        words.append(f"kill:rank={dice.randrange(ranks)},point={dice.choice(points)}{where},incarnation={life}")
    settings = f"steps=4 seed={dice.randrange(10**6)} back={dice.choice(('0.010', '0.050', '0.300'))} migrate_after=1"
    extra = dice.choice(("", "", "heavy=on", "exact=on"))
    return parse(f"{layout} {settings} {extra} mirrors=3 {' '.join(words)}")


@contextmanager
def _quiet() -> Iterator[None]:
    with redirect_stdout(StringIO()):
        yield


def _fails(scenario: Scenario) -> str:
    """Return why a run of ``scenario`` fails; empty if it does not."""
    try:
        with _quiet():
            run_and_judge(scenario)
    except Exception as error:  # whatever the run ends with is a finding
        return f"{type(error).__name__}: {error}"
    return ""


def shrunk(scenario: Scenario, fails: Callable[[Scenario], str] = _fails) -> Scenario | None:
    """Return ``scenario`` with the fewest faults that fails in some order of events; None if none does."""
    for seed in (scenario.seed, *SEEDS):
        if fails(replace(scenario, seed=seed)):
            found = replace(scenario, seed=seed)
            break
    else:
        return None
    shorter = True
    while shorter:
        shorter = False
        for number in range(len(found.faults)):
            fewer = replace(found, faults=(*found.faults[:number], *found.faults[number + 1 :]))
            if fails(fewer):
                found, shorter = fewer, True
                break
    return found


@dataclass(frozen=True)
class Outcome:
    """The kills that struck in one run; if it failed, the error and the shortest script that fails as well."""

    faults: int
    error: str = ""
    least: str = ""


def outcome(scenario: Scenario) -> Outcome:
    """Run and judge ``scenario``; whatever the run ends with is a finding."""
    try:
        with _quiet():
            cluster = run_and_judge(scenario)
    except Exception as error:
        return Outcome(0, f"{type(error).__name__}: {error}", str(shrunk(scenario) or scenario))
    return Outcome(sum(process.process.dead and process.norm is None for process in cluster.processes))


def outcomes(dice: random.Random, processes: int) -> Generator[Outcome, None, None]:
    """Yield the outcomes of drawn scenarios as they come, from so many processes; close it to end them.

    A process ends after ``RUNS`` runs: parameters with hooks are never collected, and newcomers collect garbage.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, max_tasks_per_child=RUNS) as pool:
        pending: set[Future[Outcome]] = set()
        try:
            while True:
                pending |= {pool.submit(outcome, drawn(dice)) for _ in range(2 * processes - len(pending))}
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (one.result() for one in done)
        finally:
            pool.shutdown(cancel_futures=True)


def main() -> int:
    """0 if all runs end well."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.history", description=__doc__)
    parser.add_argument("--faults", type=int, default=10_000, help="kills that strike, over all runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many, however few have struck")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    runs, faults, failed, began = 0, 0, list[str](), time.monotonic()
    with closing(outcomes(random.Random(asked.seed), asked.processes)) as ended:
        for found in ended:
            runs, faults = runs + 1, faults + found.faults
            if found.error:
                failed.append(found.least)
                print(f"{found.error}\npython -m tests.scenario '{found.least}' --as cluster", flush=True)
            if faults >= asked.faults or time.monotonic() - began >= 60 * asked.minutes:
                break
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"seed": asked.seed, "runs": runs, "faults": faults, "seconds": seconds, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
