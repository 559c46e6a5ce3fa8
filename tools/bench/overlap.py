"""The cost of communication in a step, in turn and behind computation, with kernels as timed waits and with real ones.

    python -m tools.bench.overlap [--ranks 4] [--units 16] [--elements 262144] [--steps 10] [--trials 1] [--kernels]
                                  [--gbit 10]

Data parallel. A timed wait leaves the processor free, as an accelerator does; links, state and votes are the runtime's
own. With ``--gbit R`` (root, programs ip and tc) all ranks share one TCP link of R Gbit/s, so that what is moved waits
for the link more than for a processor. Three jobs a trial: ``serial`` (``--elastic-overlap none``), ``behind``
(``both``), and ``bare`` (``both`` without mirrors and comparisons).

beyond      seconds of a step beyond its waits, of each job: so a wait that lasts longer than asked for counts nowhere
exposed     part of the serial time of reduce, ship and gather that is still beyond the waits when they go on behind
elasticity  seconds that a step is longer than that of ``bare`` without its vote, as a share of the latter
busy        processor seconds of a step, all its threads, of each job

``--kernels``: also the time of a step of the quickstart's model, whose kernels need the same processors, behind over in
turn. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from megatron.elastic.observe.events import read_events
from tools.bench._common import median_of, print_result
from tools.bench._jobs import LAUNCH, ROOT, command, finished
from tools.bench._slow_link import behind_a_slow_link
from tools.bench.overhead import BATCH, MODEL

WORKER = str(ROOT / "tools" / "bench" / "_overlap_worker.py")
MOVED = ("reduce", "ship", "gather")
WARM = 2
"""Steps at the beginning that are left out."""
JOBS: dict[str, tuple[str, ...]] = {
    "serial": ("--elastic-overlap", "none"),
    "behind": ("--elastic-overlap", "both"),
    "bare": ("--elastic-overlap", "both", "--elastic-mirrors", "0", "--elastic-verify-interval", "0"),
}


def steps_of(options: argparse.Namespace, *flags: str) -> dict[str, Any]:
    """Medians over steps and ranks of one job with timed waits. Raises ``RuntimeError`` with its output."""
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        sizes = [
            word
            for name in ("ranks", "units", "elements", "pieces", "steps", "piece_ms")
            for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))
        ]
        job = command(options.ranks, "--elastic", *sizes, "--out", folder, *flags, module=LAUNCH, script=WORKER)
        bucket = ("--elastic-bucket-elements", str(options.bucket))
        link = ("--elastic-transport", "tcp") if options.gbit else ()
        finished([*job, *bucket, *link, "--elastic-fail-slow", "off", "--no-elastic-respawn"], 170.0)
        logs = [json.loads(path.read_text())[WARM:] for path in sorted(Path(folder).glob("rank-*.json"))]
    steps = [step for log in logs for step in log]
    return {
        "seconds": median(step["seconds"] for step in steps),
        "waited": median(step["waited"] for step in steps),
        "busy": median(step["busy"] for step in steps),
        "beyond": median(step["seconds"] - step["waited"] for step in steps),
        "phases": {name: median(step["phases"].get(name, 0.0) for step in steps) for name in steps[0]["phases"]},
    }


def shares(jobs: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The figures of one trial."""
    serial, behind, bare = (jobs[name] for name in JOBS)
    moved = sum(serial["phases"].get(name, 0.0) for name in MOVED)
    vote = bare["phases"].get("vote", 0.0)
    return {
        "exposed": 1 - (serial["beyond"] - behind["beyond"]) / moved,
        "elasticity": (behind["beyond"] - bare["beyond"] + vote) / (bare["seconds"] - vote),
        "moved_share": moved / serial["seconds"],
        "step_ratio": behind["seconds"] / serial["seconds"],
    }


def kernels(ranks: int, steps: int) -> dict[str, float]:
    """Median seconds of a step of the quickstart's model, in turn and behind, smallest buckets."""
    found = {}
    for name in ("none", "both"):
        with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
            flags = ("--elastic-overlap", name, "--elastic-bucket-elements", "65536", "--elastic-event-log", folder)
            sizes = ("--global-batch-size", str(BATCH), "--train-iters", str(steps))
            finished(command(ranks, *MODEL, *sizes, "--elastic", *flags), 170.0)
            seconds = [r.fields["seconds"] for r in read_events(Path(folder)) if r.kind == "step"][WARM:]
        found[name] = median(seconds)
    return found


def main() -> None:
    """Parse, run in turn, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--units", type=int, default=16)
    parser.add_argument("--elements", type=int, default=1 << 18, help="of a unit")
    parser.add_argument("--bucket", type=int, default=1 << 18, help="elements")
    parser.add_argument("--pieces", type=int, default=2, help="micro-batches a rank and step")
    parser.add_argument("--piece-ms", type=float, default=100.0, help="forward of a piece; a backward takes twice that")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--gbit", type=float, default=0.0, help="Gbit/s of all links together; 0: as fast as they go")
    options = parser.parse_args()
    behind_a_slow_link(options.gbit, "overlap")
    trials, last = [], {}
    for _ in range(options.trials):
        last = {name: steps_of(options, *flags) for name, flags in JOBS.items()}
        trials.append(shares(last))
        print(json.dumps({**trials[-1], **last}, indent=1), file=sys.stderr, flush=True)
    found: dict[str, Any] = {name: median_of([trial[name] for trial in trials]) for name in trials[0]}
    if options.kernels:
        seconds = kernels(options.ranks, 20)
        found["kernels"] = {"seconds": seconds, "step_ratio": seconds["both"] / seconds["none"]}
    sizes = {
        name: getattr(options, name) for name in ("ranks", "units", "elements", "bucket", "pieces", "piece_ms", "gbit")
    }
    print_result("overlap", {**sizes, **found, "jobs": last})


if __name__ == "__main__":
    main()
