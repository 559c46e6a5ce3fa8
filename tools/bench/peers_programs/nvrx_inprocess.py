"""nvidia-resiliency-ext, restart within the process: the wrapped function is called again on the ranks that are left.

As its advanced example: the model and the optimizer outlive the restart where a rank has the whole model, every call
reads the newest checkpoint, which is written at every step here. A call divides the whole global batch among the
replicas that are left. With replicas of several ranks, a rank whose replica is not whole waits as a reserve. The
library's own abort names NCCL, which CPU builds of torch lack; :class:`AbortGloo` does the rest of it.

Annotations are not postponed here: the library looks at those of the wrapped function.
"""

import argparse
import logging
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "error")

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess

from tools.bench.peers_programs import common, parts

GROUP_SECONDS = 10.0
"""Time-out of the gloo group in the library's example."""


class AbortGloo(inprocess.abort.Abort):  # type: ignore[misc]  # an untyped base
    """Destroys the process groups."""

    def __call__(self, state: Any) -> Any:
        """Return ``state`` when the groups are gone."""
        if dist.is_initialized():
            dist.destroy_process_group()
        return state


@dataclass(frozen=True)
class Kept:
    """Objects of a process that are still there after a restart within it."""

    store: dist.Store
    part: parts.Part | None
    """None where a replica has several ranks: the part of a rank then depends on the ranks that are left."""
    optimizer: torch.optim.Optimizer | None


def train(
    options: argparse.Namespace,
    log: common.Log,
    kept: Kept,
    call_wrapper: inprocess.CallWrapper | None = None,
) -> None:
    """Run the steps that are left, on the ranks that are left."""
    assert call_wrapper is not None
    place = parts.Place(options.layout, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    data, timeout = common.Data.read(options.data), timedelta(seconds=options.group_timeout or GROUP_SECONDS)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(str(call_wrapper.iteration), kept.store),
        rank=place.rank,
        world_size=place.world,
        timeout=timeout,
    )
    inside, across = parts.groups_of(place, timeout)
    part = kept.part or parts.part_of(place, inside)
    optimizer = kept.optimizer or common.optimizer_of(part.model)
    checkpoints = parts.Checkpoints(options.checkpoints, place)
    first = checkpoints.load(part.model, optimizer)
    parallel = torch.nn.parallel.DistributedDataParallel(part.model, process_group=across)
    for step in range(first, options.steps):
        began = time.time()
        samples = data.rows(step, place.replica, place.replicas)
        optimizer.zero_grad()
        loss = parts.backward(part, parallel, samples, place.replicas)
        optimizer.step()
        if place.replica == 0:
            with call_wrapper.atomic():
                checkpoints.save(part.model, optimizer, step + 1)
        log.step(step + 1, began, common.ROWS, len(samples) if part.has_loss else 0, loss)


def whole_replicas(parts_of_replica: int) -> inprocess.rank_assignment.RankAssignment:
    """The usage guide's assignment for a workload that needs a multiple of some ranks: those left over are a reserve.

    Its other one, which drops each group that is not whole, would drop the partner of a lost rank for good.
    """
    return inprocess.Compose(
        inprocess.rank_assignment.ActiveWorldSizeDivisibleBy(parts_of_replica),
        inprocess.rank_assignment.ShiftRanks(),
    )


def tuned() -> dict[str, timedelta]:
    """The lowest intervals and time-outs that hold on a busy machine; the library checks their order."""
    return {
        "monitor_thread_interval": timedelta(seconds=0.1),
        "monitor_process_interval": timedelta(seconds=0.1),
        "heartbeat_interval": timedelta(seconds=0.2),
        "progress_watchdog_interval": timedelta(seconds=0.1),
        "heartbeat_timeout": timedelta(seconds=3),
        "soft_timeout": timedelta(seconds=3),
        "hard_timeout": timedelta(seconds=4),
        "barrier_timeout": timedelta(seconds=20),
        "last_call_wait": timedelta(seconds=0.1),
        "termination_grace_time": timedelta(seconds=0.5),
    }


def main() -> None:
    """Build what is kept over restarts, then call the wrapped function."""
    options = common.options(__doc__ or "")
    logging.basicConfig(level=logging.WARNING)
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    log = common.Log(options.events, rank)
    part = parts.Part(common.Gpt()) if options.layout.parts == 1 else None
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        port + 2,
        world_size=int(os.environ["WORLD_SIZE"]),
        is_master=rank == 0 and not options.tuned,
        wait_for_workers=False,
    )
    local_rank = os.environ.pop(
        "LOCAL_RANK"
    )  # with it the wrapper adds checks of GPUs, which fail where there are none
    assignment = {} if part else {"rank_assignment": whole_replicas(options.layout.parts)}
    wrapper = inprocess.Wrapper(
        **assignment,
        store_kwargs={"port": port + 1},
        abort=AbortGloo(),
        monitor_process_pidfile=str(options.events / "monitor_{rank}.pid"),
        **(tuned() if options.tuned else {}),
    )
    os.environ["LOCAL_RANK"] = local_rank
    wrapper(train)(options, log, Kept(store, part, common.optimizer_of(part.model) if part else None))


if __name__ == "__main__":
    main()
