"""``pretrain_gpt.py`` with a clock on the parts of each rank that serve its users; see ``watching``.

An iteration is the time from the beginning of a step to the beginning of the next one, so log lines and scalars belong
to it. TensorBoard writes its file in a thread, whose CPU time the kernel counts.
"""

from __future__ import annotations

import json
import os
import runpy
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import megatron.elastic.adaptor  # noqa: F401 - it patches Megatron

# isort: split

from torch.utils.tensorboard import SummaryWriter

from megatron.elastic.control.client import WorkerMembership
from megatron.elastic.engine.engine import Engine
from megatron.elastic.mcore.loop.reporter import Reporter
from megatron.elastic.observe.events import EventLog
from megatron.elastic.runtime import assembly
from megatron.elastic.runtime.publish import Publisher
from megatron.elastic.state.record import StepRecord
from tools.bench._clocks import SKIPPED, Clocks
from tools.bench._jobs import PRETRAIN


def _whose(writer: SummaryWriter, tag: str, *_: Any) -> str:
    return "scalar" if tag.startswith("elastic/") else "megatron_scalars"


def own_part(calls: Mapping[str, int]) -> float:
    """Return the share of this project among all scalars that were handed to TensorBoard's thread."""
    own, all_scalars = calls.get("scalar", 0), calls.get("scalar", 0) + calls.get("megatron_scalars", 0)
    return own / all_scalars if all_scalars else 0.0


CLOCKED: tuple[tuple[object, str, str | Callable[..., str]], ...] = (
    # as the listener has imported them: they gather the values of an event, and write it
    (assembly, "write_record", "events"),
    (assembly, "write_step", "events"),
    (assembly, "write_experts", "events"),
    (EventLog, "write", "events"),
    (StepRecord, "_hashed", "digest"),  # the next step needs it, whether an event has it or not
    (Publisher, "stepped", "published"),
    (WorkerMembership, "figures", "published"),
    (Reporter, "log", "scalars"),
    (Reporter, "flush", "scalars"),
    (SummaryWriter, "add_scalar", _whose),
)
"""Function (owner, name) → its clock."""


def writer_seconds() -> float:
    """CPU seconds so far of the threads in which TensorBoard writes."""
    threads = [one for one in threading.enumerate() if type(one).__name__ == "_AsyncWriterThread"]
    return sum(_thread_seconds(one.native_id) for one in threads if one.native_id is not None)


def _thread_seconds(thread: int) -> float:
    """CPU seconds of a thread of this process; 0 where it has just ended (man 5 proc_pid_schedstat)."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        return 0.0


def main() -> None:
    """Patch, train, write the counts."""
    clocks = Clocks()
    for owner, name, clock in CLOCKED:
        clocks.put(owner, name, clock)
    walls: list[float] = []
    processes: list[float] = []
    writer: list[float] = []
    spent: dict[str, float] = {}
    calls: dict[str, int] = {}
    step = Engine.step

    def counted(self: Engine, *args: Any, **kwargs: Any) -> Any:
        if len(walls) == SKIPPED:
            clocks.clear()
            spent.clear()
            calls.clear()
        walls.append(time.monotonic())
        processes.append(time.process_time())
        writer.append(writer_seconds())
        spent.update(clocks.spent)
        calls.update(clocks.calls)
        return step(self, *args, **kwargs)

    Engine.step = counted  # type: ignore[method-assign]
    try:
        runpy.run_path(PRETRAIN, run_name="__main__")
    finally:
        iterations = len(walls) - SKIPPED - 1
        report = {
            "cpu_seconds": {name: seconds / iterations for name, seconds in spent.items()},
            "writer_seconds": (writer[-1] - writer[SKIPPED]) / iterations * own_part(calls),
            "scalars_a_step": calls.get("scalar", 0) / iterations,
            "process_seconds": (processes[-1] - processes[SKIPPED]) / iterations,
            "walls": [later - earlier for earlier, later in zip(walls[SKIPPED:], walls[SKIPPED + 1 :], strict=False)],
        }
        Path(os.environ["WATCHING_OUT"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
