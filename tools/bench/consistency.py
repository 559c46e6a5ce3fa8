"""Effect of a loss on the numbers: this runtime's default and exact modes beside a naive elastic run.

    python -m tools.bench.consistency [--steps 60] [--at 20] [--ranks 4] [--naive-ranks 2]

Each way trains the same model with dropout twice: undisturbed, and with a loss at step ``--at`` after which no rank
returns from.

default     ``--elastic``: the survivors finish the step
exact       ``--elastic-exact``, compared by the hashes of its last checkpoint as well (docs/design.md §8)
smaller     ``--elastic-policy torchft``: the replica is dropped, and its part of every batch with it
restarted   plain Megatron-LM: saved at the step before, started again with fewer data-parallel ranks and the same
            global batch, so that each dropout mask is drawn by another rank's generator

Losses are those of Megatron's log lines (seven digits). The last line is one JSON object: the largest relative
deviation after the loss, and the mean over these steps.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.bench._common import print_result
from tools.bench._jobs import LAUNCH, QUIET, TORCHRUN, command, faults, finished
from tools.fingerprint import checkpoint_fingerprint, differences
from tools.training_log import Iteration, iterations_of

MODEL = QUIET + shlex.split("""
    --num-layers 2 --hidden-size 96 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 16 --vocab-size 511 --calculate-per-token-loss
    --hidden-dropout 0.1 --attention-dropout 0.1
""")


@dataclass(frozen=True)
class Deviation:
    """Relative deviation of the loss from the undisturbed run's, over the steps from the loss on."""

    largest: float
    mean: float


def train(module: str, ranks: int, flags: Sequence[str]) -> dict[int, Iteration]:
    """Megatron's log of one run, by step. Raises ``RuntimeError`` with its output when it fails."""
    return iterations_of(finished(command(ranks, *MODEL, *flags, module=module)).splitlines())


def deviation(calm: dict[int, Iteration], torn: dict[int, Iteration], first: int) -> Deviation:
    """Of ``torn`` from ``calm`` from step ``first`` on. Raises ``RuntimeError`` if a step is missing."""
    steps = [step for step in calm if step >= first]
    if missing := [step for step in steps if step not in torn]:
        raise RuntimeError(f"the disturbed run did not log steps {missing[:5]}")
    off = [abs(torn[step].loss - calm[step].loss) / abs(calm[step].loss) for step in steps]
    return Deviation(max(off), statistics.fmean(off))


def lost(options: argparse.Namespace) -> tuple[str, ...]:
    """Flags by which the last rank is killed in the middle of step ``--at``."""
    return faults(f"kill:rank={options.ranks - 1},step={options.at},point=mid_backward")


def elastic(options: argparse.Namespace, *flags: str) -> tuple[dict[int, Iteration], dict[int, Iteration]]:
    """An undisturbed run and one that loses its last rank, both under ``--elastic``."""
    run = ("--elastic", "--train-iters", str(options.steps), *flags)
    torn = (*run, "--no-elastic-respawn", *lost(options))
    return train(LAUNCH, options.ranks, run), train(LAUNCH, options.ranks, torn)


def exact(options: argparse.Namespace, folder: Path) -> tuple[Deviation, int]:
    """In exact mode; also how many tensors of the last checkpoints (weights and moments) differ."""
    logs, prints = [], []
    for name, loss in (("calm", ()), ("torn", lost(options))):
        save = ("--save", str(folder / name), "--save-interval", str(options.steps))
        flags = ("--elastic", "--elastic-exact", "--no-elastic-respawn", "--train-iters", str(options.steps))
        logs.append(train(LAUNCH, options.ranks, (*flags, *save, *loss)))
        prints.append(checkpoint_fingerprint(folder / name))
    calm, torn = logs
    return deviation(calm, torn, options.at), len(list(differences(*prints)))


def restarted(options: argparse.Namespace, folder: Path) -> Deviation:
    """Plain Megatron-LM, stopped before the step and started again with fewer ranks."""
    run = ("--train-iters", str(options.steps))
    keep = ("--save", str(folder), "--save-interval", str(options.at - 1))
    calm = train(TORCHRUN, options.ranks, run)
    train(TORCHRUN, options.ranks, (*run, *keep, "--exit-interval", str(options.at - 1)))
    torn = train(TORCHRUN, options.naive_ranks, (*run, "--load", str(folder)))
    return deviation(calm, torn, options.at)


def main() -> None:
    """Parse, run the four ways, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--at", type=int, default=20, help="the step in which the rank is lost")
    parser.add_argument("--ranks", type=int, default=4, help="data-parallel ranks")
    parser.add_argument("--naive-ranks", type=int, default=2, help="ranks that plain Megatron-LM restarts with")
    options = parser.parse_args()
    found: dict[str, Deviation] = {}
    with tempfile.TemporaryDirectory() as folder:
        found["default"] = deviation(*elastic(options), options.at)
        found["exact"], tensors = exact(options, Path(folder) / "exact")
        found["smaller"] = deviation(*elastic(options, "--elastic-policy", "torchft"), options.at)
        found["restarted"] = restarted(options, Path(folder) / "plain")
    for name, off in found.items():
        print(f"{name:>10}: largest {off.largest:.1e}, mean {off.mean:.1e}", file=sys.stderr)
    shape = {"ranks": options.ranks, "steps": options.steps, "at": options.at, "naive_ranks": options.naive_ranks}
    print_result("consistency", {**shape, "deviation": found, "exact_tensors_that_differ": tensors})


if __name__ == "__main__":
    main()
