"""``pretrain_gpt.py`` with a clock on the costs of elasticity for each rank while nothing fails; see ``overhead``.

The clocks are those of :mod:`_clocks`. They are few: within a step the code of a clock is in no cache, and a look at
it takes more time than is taken off for it. So no copy is on a clock by itself, and what mirrors do with a message,
except for its checksums, is in that of shipping.
"""

from __future__ import annotations

import runpy
import time
from collections.abc import Callable, Collection
from typing import Any

import megatron.elastic.adaptor  # noqa: F401 - it patches Megatron

# isort: split

from megatron.elastic.control.client import WorkerMembership
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.transaction import shipment
from megatron.elastic.engine.transaction.phases import StepBody
from megatron.elastic.engine.transaction.shipment import Shipment
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import StepRecord
from tools.bench._clocks import SKIPPED, Clocks, write_counts
from tools.bench._jobs import PRETRAIN

Apply = Callable[..., tuple[BlockKey, ...]]


def owned_and_mirrored(clocks: Clocks, apply: Apply) -> Apply:
    """Return :meth:`StatePool.apply` in two parts, each on a clock of its own."""
    update, replay = clocks.timed("update_owned", apply), clocks.timed("replay_mirrored", apply)

    def replacement(
        pool: StatePool, record: StepRecord, keys: Collection[BlockKey], mirrored: Collection[BlockKey]
    ) -> tuple[BlockKey, ...]:
        mine, theirs = (tuple(key for key in keys if (key in mirrored) is wanted) for wanted in (False, True))
        return tuple(sorted((*update(pool, record, mine), *replay(pool, record, theirs, mirrored))))

    return replacement


CLOCKED: tuple[tuple[object, str, str], ...] = (
    (Shipment, "__init__", "ship"),
    (Shipment, "post", "ship"),
    (StepBody, "ship", "ship"),
    (StepBody, "reduce", "reduce"),
    (StepBody, "gather", "gather"),
    (StepBody, "vote", "vote"),
    (StepBody, "tally", "vote"),
    (StepBody, "compute", "compute"),
    (StatePool, "retain_all", "retain"),
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
    StatePool.apply = owned_and_mirrored(clocks, StatePool.apply)  # type: ignore[method-assign]
    steps: list[float] = []
    processes: list[float] = []
    held: list[int] = []
    step = Engine.step

    def counted(self: Engine, *args: Any, **kwargs: Any) -> Any:
        if len(steps) == SKIPPED:
            clocks.clear()
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
