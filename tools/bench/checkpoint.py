"""What a save costs the steps around it: written while training goes on, and finished before the next step.

    python -m tools.bench.checkpoint [--trials 3] [--ranks 2] [--hidden 512]

Each trial runs both ways and one that never saves, in turn, on the same model and
data. Per run: time between committed steps (the job's own event log, monotonic).
``stall_s``: the gap that holds the save less the median gap of the run without one;
``drag_s``: what the later gaps add up to beyond that median while the background
write is going on. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import tempfile
from pathlib import Path

from megatron.elastic.observe.events import read_events
from tools.bench._common import median_of, print_result
from tools.bench._jobs import QUIET, command, finished

WARM_UP, SAVED_AT, STEPS = 3, 6, 14

MODEL = QUIET + shlex.split("""
    --num-layers 4 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 8 --vocab-size 2047 --ckpt-format torch_dist
""")


def gaps(ranks: int, hidden: int, folder: Path, *flags: str) -> dict[int, float]:
    """Step → seconds from the step before it to it. Raises ``RuntimeError`` with its output when the run fails."""
    sizes = ("--hidden-size", str(hidden), "--train-iters", str(STEPS))
    events = ("--elastic", "--elastic-event-log", str(folder / "events"))
    finished(command(ranks, *MODEL, *sizes, *events, *flags))
    at = {r.fields["step"]: r.monotonic_ns / 1e9 for r in read_events(folder / "events") if r.kind == "step"}
    return {step: at[step] - at[step - 1] for step in at if step - 1 in at}


def costs(ranks: int, hidden: int) -> dict[str, float]:
    """One trial."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plain").mkdir()
        usual = statistics.median(value for step, value in gaps(ranks, hidden, folder / "plain").items()
                                  if step > WARM_UP)  # fmt: skip
        found = {"step_s": usual}
        for way, flag in (("background", "--elastic-background-save"), ("blocking", "--no-elastic-background-save")):
            (folder / way).mkdir()
            save = ("--save", str(folder / way / "saved"), "--save-interval", str(SAVED_AT), flag)
            measured = gaps(ranks, hidden, folder / way, *save)
            found[f"stall_{way}_s"] = measured[SAVED_AT + 1] - usual
            later = [measured[step] - usual for step in range(SAVED_AT + 2, 2 * SAVED_AT)]
            found[f"drag_{way}_s"] = sum(later)
    return found


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    options = parser.parse_args()
    trials = [costs(options.ranks, options.hidden) for _ in range(options.trials)]
    parameters = 12 * 4 * options.hidden**2 + 2048 * options.hidden
    result = {
        "ranks": options.ranks, "trials": options.trials,
        "state_mib": round(parameters * 16 / 2**20, 1),
        **{name: median_of([trial[name] for trial in trials]) for name in trials[0]},
    }  # fmt: skip
    print_result("checkpoint", result)


if __name__ == "__main__":
    main()
