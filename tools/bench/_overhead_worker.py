"""``pretrain_gpt.py`` with a clock on the costs of elasticity for each rank while nothing fails; see ``overhead``.

The clocks are those of :mod:`_clocks`.
"""

from __future__ import annotations

import runpy
import time
from collections.abc import Callable
from typing import Any

import megatron.elastic.adaptor  # noqa: F401 - it patches Megatron

# isort: split

from megatron.elastic.control.client import WorkerMembership
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.transaction import shipment
from megatron.elastic.engine.transaction.phases import StepBody
from megatron.elastic.engine.transaction.shipment import Shipment
from megatron.elastic.state.pool import StatePool
from tools.bench._clocks import SKIPPED, Clocks, write_counts
from tools.bench._jobs import PRETRAIN


def _whose(pool: StatePool, copy: Any, *_: Any) -> str:
    return "update_owned" if copy.block.key in OWNED else "replay_mirrored"


OWNED: set[tuple[int, int, int]] = set()

CLOCKED: tuple[tuple[object, str, str | Callable[..., str]], ...] = (
    (Shipment, "__init__", "ship"),
    (Shipment, "post", "ship"),
    (StepBody, "ship", "ship"),
    (StepBody, "reduce", "reduce"),
    (StepBody, "gather", "gather"),
    (StepBody, "vote", "vote"),
    (StepBody, "tally", "vote"),
    (StepBody, "compute", "compute"),
    (StatePool, "retain", "retain"),
    (StatePool, "retain_all", "retain"),
    (StatePool, "_step", _whose),
    (WorkerMembership, "publish", "publish"),
    # as the step's body has imported them
    (shipment, "block_checksums", "checksums"),
    (shipment, "disputes", "checksums"),
)
"""Function (owner, name) → its clock."""


def main() -> None:
    """Patch, train, write the counts."""
    clocks = Clocks()
    for owner, name, clock in CLOCKED:
        clocks.put(owner, name, clock)
    steps: list[float] = []
    processes: list[float] = []
    held: list[int] = []
    step = Engine.step

    def counted(self: Engine, *args: Any, **kwargs: Any) -> Any:
        if len(steps) == SKIPPED:
            clocks.clear()
        OWNED.clear()
        OWNED.update(block.key for block in self.view.owned)
        wall, process = time.monotonic(), time.process_time()
        result = clocks.timed("rest", step)(self, *args, **kwargs)
        steps.append(time.monotonic() - wall)
        processes.append(time.process_time() - process)
        held[:] = [self.tools.pool.bytes_held() + self.tools.messages.bytes_free, self.tools.arena.parameters.numel()]
        return result

    Engine.step = counted  # type: ignore[method-assign]
    try:
        runpy.run_path(PRETRAIN, run_name="__main__")
    finally:
        more = {"step_seconds": steps[SKIPPED:], "bytes_held": held[0], "parameters": held[1]}
        write_counts(clocks, processes, **more)


if __name__ == "__main__":
    main()
