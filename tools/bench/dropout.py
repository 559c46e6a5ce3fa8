"""Sample-keyed dropout beside torch's, forward and backward, at Megatron's three sites.

    OMP_NUM_THREADS=1 python -m tools.bench.dropout [--trials 15] [--threads 1]

Trials of both alternate in one process; with one thread, CPU time of that thread is
taken, so that other processes do not blur it. ``ratio`` is torch's median time over ours
(above 1: ours is faster). ``backward``: forming the mask again, as the engine does,
against keeping a byte mask from forward; the latter costs one byte an element.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.elastic import _random
from megatron.elastic.engine.compute.dropout import BiasDropoutAdd, DropoutKey, SampleDropout, Site, dropout_scope
from tools.bench._common import median_of, print_result

P = 0.1
UNIT = 3


@dataclass(frozen=True)
class Case:
    """A site of dropout: its tensor's shape and which dimension counts samples."""

    name: str
    shape: tuple[int, ...]
    sample_dim: int


CASES = (
    Case("hidden [s, b, h]", (512, 4, 512), 1),
    Case("attention [b, np, sq, sk]", (4, 8, 256, 256), 0),
    Case("small hidden", (64, 2, 64), 1),
)
DTYPES = (torch.float32, torch.bfloat16)


def seconds(work: Callable[[], Any]) -> float:
    """Time of one call."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    work()
    return clock() - began


def alternate(first: Callable[[], Any], second: Callable[[], Any], trials: int, repeat: int) -> tuple[float, float]:
    """Median nanoseconds of one call of each, measured in turns."""
    for work in (first, second):
        work()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(trials):
        for work, kept in zip((first, second), times, strict=True):
            kept.append(seconds(lambda work=work: [work() for _ in range(repeat)]) / repeat)  # type: ignore[misc]
    return median_of(times[0]).median * 1e9, median_of(times[1]).median * 1e9


def both_ways(forward: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Callable[[], None]:
    """Forward and backward once."""

    def run() -> None:
        torch.autograd.grad(forward(x), x, grad)

    return run


def measure(case: Case, dtype: torch.dtype, trials: int) -> dict[str, Any]:
    """Figures of one site and dtype, nanoseconds an element."""
    x = torch.randn(case.shape).to(dtype).requires_grad_()
    residual, grad = torch.randn(case.shape).to(dtype), torch.randn(case.shape).to(dtype)
    repeat = max(1, 2_000_000 // x.numel())
    module = SampleDropout(P, unit=UNIT, site=Site.MLP_OUTPUT, sample_dim=case.sample_dim)
    added = BiasDropoutAdd(UNIT, Site.MLP_OUTPUT, sample_dim=case.sample_dim)(True)
    kept = torch.rand(case.shape) > P
    zero = torch.zeros((), dtype=dtype)

    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "dropout": (both_ways(module, x, grad), both_ways(lambda a: F.dropout(a, P), x, grad)),
        "dropout_add": (
            both_ways(lambda a: added((a, None), residual, P), x, grad),
            both_ways(lambda a: residual + F.dropout(a, P), x, grad),
        ),
        "backward": (lambda: module(grad), lambda: torch.where(kept, grad * (1 / (1 - P)), zero)),
    }
    figures: dict[str, Any] = {"site": case.name, "dtype": str(dtype).removeprefix("torch.")}
    with dropout_scope(DropoutKey(1, 1, tuple(range(case.shape[case.sample_dim])))):
        for name, (ours, other) in pairs.items():
            mine, theirs = alternate(ours, other, trials, repeat)
            label = "kept_mask" if name == "backward" else "torch"
            figures[name] = {
                "ours_ns": round(mine / x.numel(), 3),
                f"{label}_ns": round(theirs / x.numel(), 3),
                "ratio": round(theirs / mine, 2),
            }
    return figures


def main() -> None:
    """Measure the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=15, help="alternating trials of each")
    parser.add_argument("--threads", type=int, default=1, help="threads torch may use; ours uses one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [measure(case, dtype, options.trials) for case in CASES for dtype in DTYPES]
    for row in rows:
        parts = ", ".join(f"{name} {row[name]['ratio']}×" for name in ("dropout", "dropout_add", "backward"))
        print(f"{row['site']:28} {row['dtype']:9} {parts}")
    instructions = ("generic", "AVX2", "AVX-512")[_random.widest_isa()]
    ratios = [row[name]["ratio"] for row in rows for name in ("dropout", "dropout_add")]
    print_result(
        "dropout",
        {"p": P, "threads": options.threads, "instructions": instructions, "least_ratio": min(ratios), "cases": rows},
    )


if __name__ == "__main__":
    main()
