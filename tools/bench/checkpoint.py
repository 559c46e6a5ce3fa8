"""Cost of a save for the steps around it: Megatron-LM's own, and with --elastic in the background or before a step.

    python -m tools.bench.checkpoint [--trials 3] [--ranks 2] [--hidden 512]

Each trial runs, in turn, on the same model and data: Megatron-LM without and with a
save, then --elastic without one, with one in the background and with one that is
finished before the next step. Every run's clock is the same: when its line of each
iteration comes. ``stall_X_s``: the gap that holds the save less the median gap of the
run of that kind without one; ``drag_X_s``: the sum of the gaps after it beyond
that median, in which the background write goes on. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import tempfile
from pathlib import Path

from tools.bench._common import median_of, print_result
from tools.bench._jobs import LAUNCH, QUIET, TORCHRUN, command, followed

WARM_UP, SAVED_AT, STEPS = 3, 6, 12
"""The next save would be due at step 12, the last one, where a job saves in any case."""

MODEL = QUIET + shlex.split("""
    --num-layers 4 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 8 --vocab-size 2047 --ckpt-format torch_dist
    --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable
""")

PLAIN: tuple[str, ...] = ()
ELASTIC = ("--elastic",)
KINDS = {
    "megatron": (PLAIN, PLAIN),
    "background": (ELASTIC, ("--elastic-background-save",)),
    "blocking": (ELASTIC, ("--no-elastic-background-save",)),
}
"""Name → flags of the kind of run, flags of its save."""


def gaps(ranks: int, hidden: int, *flags: str) -> dict[int, float]:
    """Iteration → seconds from the line of the one before to its own. Raises ``RuntimeError`` when the run fails."""
    sizes = ("--hidden-size", str(hidden), "--train-iters", str(STEPS))
    module = LAUNCH if "--elastic" in flags else TORCHRUN
    lines = followed(command(ranks, *MODEL, *sizes, *flags, module=module))
    at = {int(found[1]): when for when, line in lines if (found := re.search(r"iteration\s+(\d+)/", line))}
    return {step: at[step] - at[step - 1] for step in at if step - 1 in at}


def costs(ranks: int, hidden: int) -> dict[str, float]:
    """One trial."""
    usual: dict[tuple[str, ...], float] = {}
    found: dict[str, float] = {}
    for name, (kind, way) in KINDS.items():
        if kind not in usual:
            steady = [seconds for step, seconds in gaps(ranks, hidden, *kind).items() if step > WARM_UP]
            usual[kind] = found[f"step_{'elastic' if kind else 'megatron'}_s"] = statistics.median(steady)
        with tempfile.TemporaryDirectory() as folder:
            save = ("--save", str(Path(folder) / "saved"), "--save-interval", str(SAVED_AT))
            measured = gaps(ranks, hidden, *kind, *save, *way)
        found[f"stall_{name}_s"] = measured[SAVED_AT + 1] - usual[kind]
        found[f"drag_{name}_s"] = sum(measured[step] - usual[kind] for step in range(SAVED_AT + 2, STEPS + 1))
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
        "ranks": options.ranks,
        "trials": options.trials,
        "state_mib": round(parameters * 16 / 2**20, 1),
        **{name: median_of([trial[name] for trial in trials]) for name in trials[0]},
    }
    print_result("checkpoint", result)


if __name__ == "__main__":
    main()
