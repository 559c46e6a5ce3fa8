"""Random jobs under random faults for a while, each judged by the history checker (``tools/history``).

    python -m tools.chaos --minutes 60 --seed 7           # a developer's tool; needs the tests beside it
    python -m tools.chaos --seed 7 --only 12              # the twelfth job of that run once more

Each job is drawn from the seed and its number: layout, settings and faults. Its kind decides who makes the faults:

    script   the scenario's own words (``tests/scenario``), injected at named points
    outside  SIGKILL and SIGSTOP to any worker at any instant, also to ranks on their way back; slow and late ranks;
             a wall clock that jumps, a slow disk; at the end perhaps a drained rank; checkpoints, at times on a disk
             that gets full
    nodes    several agents on one machine: whole nodes or their agents killed, stopped and started again, their way
             to the store cut; with etcd the coordinator too, and one of etcd's three members at a time
    hosts    two network namespaces: packets that are late, lost, or have a bit changed, a partition, and a cable that
             is pulled
    links    a link between two healthy ranks breaks

In the first three kinds the losses of training are compared with an undisturbed run's, bit by bit in exact mode. A
job fails if the checker finds anything, if it does not end in time or as it should, or if it lost a step. Then its
text and the command that repeats it are printed; where the in-process cluster fails by the same scenario, that one
with the fewest faults as well. When a signal comes is a matter of the machine, so a failure ``outside`` may need
several tries. The last line is one JSON object; exit status 1 if a job failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools.chaos.acts import ACTS
from tools.chaos.jobs import KINDS, Job, drawn
from tools.chaos.reference import Played, judge

__all__ = ["main", "play"]


def play(job: Job, folder: Path) -> Played:
    """Run a job, and judge it. ``folder``: of the whole session, which keeps undisturbed runs."""
    here = Path(tempfile.mkdtemp(prefix=f"{job.kind}-", dir=folder))
    played = Played()
    try:
        ACTS[job.kind](job, here, played)
    except Exception as error:  # whatever a job ends with is a finding
        played.why.append(f"{type(error).__name__}: {error}"[:4000])
    for events in sorted(here.glob("**/events")):
        if "undisturbed" not in events.parts:
            judge(events, played)
    (here / "why.txt").write_text("\n".join(played.why) + "\n\n" + played.output)
    return played


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all jobs passed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no job after so many")
    parser.add_argument("--seed", default=str(time.time_ns() % 10_000))
    parser.add_argument("--only", type=int, help="run the job of this number alone")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="leave out jobs of other kinds")
    parser.add_argument("--folder", type=Path, help="keeps logs and outputs (default: a temporary one)")
    asked = parser.parse_args(arguments)
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="chaos"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"--seed {asked.seed}, logs in {folder}", flush=True)
    began, number, jobs, faults, failed = time.monotonic(), asked.only or 0, 0, 0, list[int]()
    while time.monotonic() - began < 60 * asked.minutes:
        job = drawn(asked.seed, number)
        if asked.kinds is None or job.kind in asked.kinds:
            print(f"{number}: {job}", flush=True)
            played = play(job, folder)
            jobs, faults = jobs + 1, faults + played.faults
            if played.why:
                failed.append(number)
                _tell(asked.seed, number, played)
        if asked.only is not None:
            break
        number += 1
    seconds = round(time.monotonic() - began, 1)
    result = {"seed": asked.seed, "jobs": jobs, "faults": faults, "seconds": seconds, "failed": failed}
    print(json.dumps(result))
    return 1 if failed else 0


def _tell(seed: str, number: int, played: Played) -> None:
    print("\n".join(played.why), flush=True)
    print(f"repeat: python -m tools.chaos --seed {seed} --only {number}", flush=True)
    if played.smaller:
        print(f"shrunk: python -m tests.scenario '{played.smaller}' --as cluster", flush=True)


if __name__ == "__main__":
    sys.exit(main())
