"""``pretrain_gpt.py`` of plain Megatron with a clock on what the vote replaces, for each rank; see ``overhead``.

The vote carries the squared norms of gradients, which also tell whether all of them are finite. Megatron's sums of
losses and tokens, which it replaces as well, have no function of their own and are left out.
"""

from __future__ import annotations

import runpy
import time
from typing import Any

import megatron.elastic.adaptor

# isort: split

import megatron.training.training
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer.optimizer import MegatronOptimizer

from tools.bench._clocks import SKIPPED, Clocks, write_counts
from tools.bench._jobs import PRETRAIN

CLOCKED: tuple[tuple[object, str, str], ...] = (
    (MegatronOptimizer, "get_grad_norm", "norm"),
    (_ParamAndGradBucketGroup, "check_grads", "finite"),
)
"""Function (owner, name) → its clock."""


def main() -> None:
    """Patch, train, write the counts."""
    clocks = Clocks()
    for owner, name, clock in CLOCKED:
        clocks.put(owner, name, clock)
    processes: list[float] = []
    step = megatron.training.training.train_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        if len(processes) == SKIPPED:
            clocks.clear()
        began = time.process_time()
        result = step(*args, **kwargs)
        processes.append(time.process_time() - began)
        return result

    megatron.training.training.train_step = counted
    try:
        runpy.run_path(PRETRAIN, run_name="__main__")
    finally:
        write_counts(clocks, processes)


if __name__ == "__main__":
    main()
