"""``pretrain_gpt.py`` with a clock on the costs of elasticity for each rank while nothing fails; see ``overhead``.

Clocks are of thread CPU time, so that waiting for a peer, or for a core that others
use, is not taken for cost. They nest: what an inner one counts is taken off the outer.
"""

from __future__ import annotations

import json
import os
import runpy
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.elastic.adaptor  # noqa: F401 - it patches Megatron

# isort: split

from megatron.elastic.control.client import WorkerMembership
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.transaction import shipment
from megatron.elastic.engine.transaction.phases import StepBody
from megatron.elastic.state.pool import StatePool

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 8
"""Steps before the clocks count: caches, profiles and prefetching settle."""


class Clocks:
    """CPU seconds by name, within steps that count."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._inner = [0.0]

    def timed(self, name: str | Callable[..., str], original: Callable[..., Any]) -> Callable[..., Any]:
        """``original`` on the clock ``name`` (or what ``name`` says of its arguments)."""

        def replacement(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            began = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                took = time.thread_time() - began
                inside = self._inner.pop()
                self._inner[-1] += took
                clock = name if isinstance(name, str) else name(*args)
                self.spent[clock] += took - inside
                self.calls[clock] += 1

        return replacement


def _whose(pool: StatePool, copy: Any, *_: Any) -> str:
    return "update_owned" if copy.block.key in OWNED else "replay_mirrored"


OWNED: set[tuple[int, int, int]] = set()

CLOCKED: tuple[tuple[object, str, str | Callable[..., str]], ...] = (
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
        setattr(owner, name, clocks.timed(clock, vars(owner)[name]))
    steps: list[float] = []
    processes: list[float] = []
    held: list[int] = []
    step = Engine.step

    def counted(self: Engine, *args: Any, **kwargs: Any) -> Any:
        if len(steps) == SKIPPED:
            clocks.spent.clear()
            clocks.calls.clear()
        OWNED.clear()
        OWNED.update(block.key for block in self.view.owned)
        wall, process = time.monotonic(), time.process_time()
        result = clocks.timed("rest", step)(self, *args, **kwargs)
        steps.append(time.monotonic() - wall)
        processes.append(time.process_time() - process)
        held[:] = [self.tools.pool.bytes_held(), self.tools.arena.parameters.numel()]
        return result

    Engine.step = counted  # type: ignore[method-assign]
    try:
        runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
    finally:
        counted_steps = max(1, len(steps) - SKIPPED)
        report = {
            "cpu_seconds": {name: spent / counted_steps for name, spent in clocks.spent.items()},
            "calls": {name: calls / counted_steps for name, calls in clocks.calls.items()},
            "step_seconds": steps[SKIPPED:],
            "process_seconds": processes[SKIPPED:],
            "bytes_held": held[0],
            "parameters": held[1],
        }
        Path(os.environ["OVERHEAD_OUT"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
