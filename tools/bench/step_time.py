"""Time of a step: plain Megatron-LM beside --elastic, on the native communicator and on gloo.

    python -m tools.bench.step_time [--trials 2] [--steps 12] [--ranks 4] [--tensor 1] [--pipeline 1]
        [--chunks 1] [--mirrors 1]

Each trial runs all of them in turn on the same model and data, so that noise of the machine affects each
alike; per run the median of Megatron's own
"elapsed time per iteration" after the first few. What counts is the ratios, pair by
pair. Two trials at DP 4 take about three minutes on two cores, most of it starting;
with more steps rather than more trials only the medians get quieter. With ``--chunks``
plain pipelines and interleaved ones, each under Megatron and the engine, and nothing
else. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import sys

from tools.bench._common import median_of, print_result
from tools.bench._jobs import LAUNCH, QUIET, TORCHRUN, command, finished

WARM_UP = 4

MODEL = QUIET + shlex.split("""
    --num-layers 4 --hidden-size 192 --num-attention-heads 6 --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 2 --global-batch-size 32 --vocab-size 2047
    --hidden-dropout 0.1 --attention-dropout 0.1
""")


def milliseconds(module: str, ranks: int, flags: list[str]) -> float:
    """Median step of one run. Raises ``RuntimeError`` with its output when it fails."""
    output = finished(command(ranks, *MODEL, *flags, module=module))
    found = [float(value) for value in re.findall(r"elapsed time per iteration \(ms\): (\S+)", output)]
    return statistics.median(found[WARM_UP:])


def interleaved(ways: dict[str, tuple[str, list[str]]], chunks: int) -> dict[str, tuple[str, list[str]]]:
    """The same ways with ``chunks`` model chunks a stage."""
    flags = ["--num-virtual-stages-per-pipeline-rank", str(chunks)]
    return {f"{name}_interleaved": (module, [*given, *flags]) for name, (module, given) in ways.items()}


def main() -> None:
    """Parse, run in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=1, help="model chunks a stage")
    parser.add_argument("--mirrors", type=int, default=1)
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: the first {WARM_UP} are not counted")
    sizes = {"--tensor-model-parallel-size": options.tensor, "--pipeline-model-parallel-size": options.pipeline}
    shape = [*(str(word) for size in sizes.items() for word in size), "--train-iters", str(options.steps)]
    mirrors = ["--elastic-mirrors", str(options.mirrors)]
    ways: dict[str, tuple[str, list[str]]] = {
        "megatron": (TORCHRUN, shape),
        "elastic": (LAUNCH, [*shape, "--elastic", *mirrors]),
    }
    ways |= (
        interleaved(ways, options.chunks)
        if options.chunks > 1
        else {
            "elastic_gloo": (LAUNCH, [*shape, "--elastic", "--elastic-comm", "gloo", *mirrors]),
            "elastic_no_mirrors": (LAUNCH, [*shape, "--elastic", "--elastic-mirrors", "0"]),
        }
    )
    if options.pipeline > 1 and options.chunks == 1:
        ways["elastic_zero_bubble"] = (LAUNCH, [*shape, "--elastic", "--elastic-schedule", "zero-bubble", *mirrors])
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.trials):
        for name, (module, flags) in ways.items():
            times[name].append(milliseconds(module, options.ranks, flags))
            print(f"{name}: {times[name][-1]:.1f} ms", file=sys.stderr, flush=True)
    ratios = {
        f"{name}/megatron": median_of([a / b for a, b in zip(times[name], times["megatron"], strict=True)])
        for name in ways
        if name != "megatron"
    }
    for name, other in (("elastic", "elastic_no_mirrors"), ("elastic_interleaved", "megatron_interleaved")):
        if other in times:
            ratios[f"{name}/{other}"] = median_of([a / b for a, b in zip(times[name], times[other], strict=True)])
    print_result(
        "step_time",
        {
            "ranks": options.ranks,
            "tensor": options.tensor,
            "pipeline": options.pipeline,
            "chunks": options.chunks,
            "mirrors": options.mirrors,
            "step_ms": {name: median_of(values) for name, values in times.items()},
            "ratio": ratios,
        },
    )


if __name__ == "__main__":
    main()
