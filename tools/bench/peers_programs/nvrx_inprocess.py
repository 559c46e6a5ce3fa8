"""nvidia-resiliency-ext, restart within the process: the wrapped function is called again on the ranks that are left.

As its advanced example: the model and the optimizer outlive the restart, every call reads the newest checkpoint, which
is written at every step here. A call divides the whole global batch among the ranks that are left. The library's own
abort names NCCL, which CPU builds of torch lack; :class:`AbortGloo` does the rest of it.

Annotations are not postponed here: the library looks at those of the wrapped function.
"""

import argparse
import logging
import os
import time
from datetime import timedelta
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "error")

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess

from tools.bench.peers_programs import common

GROUP_SECONDS = 10.0
"""Time-out of the gloo group in the library's example."""


class AbortGloo(inprocess.abort.Abort):  # type: ignore[misc]  # an untyped base
    """Destroys the process groups."""

    def __call__(self, state: Any) -> Any:
        """Return ``state`` when the groups are gone."""
        if dist.is_initialized():
            dist.destroy_process_group()
        return state


def train(
    options: argparse.Namespace,
    log: common.Log,
    model: common.Gpt,
    optimizer: torch.optim.Optimizer,
    store: dist.Store,
    call_wrapper: inprocess.CallWrapper | None = None,
) -> None:
    """Run the steps that are left, on the ranks that are left."""
    assert call_wrapper is not None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = common.Data.read(options.data)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(str(call_wrapper.iteration), store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=options.group_timeout or GROUP_SECONDS),
    )
    first = common.load(options.checkpoint, model, optimizer)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(first, options.steps):
        began = time.time()
        samples = data.rows(step, rank, world)
        optimizer.zero_grad()
        loss = common.backward(model, parallel, samples, world)
        optimizer.step()
        if rank == 0:
            with call_wrapper.atomic():
                common.save(options.checkpoint, model, optimizer, step + 1)
        log.step(step + 1, began, common.ROWS, len(samples), loss)


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
    """Build what outlives a restart, then call the wrapped function."""
    options = common.options(__doc__ or "")
    logging.basicConfig(level=logging.WARNING)
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    log = common.Log(options.events, rank)
    model = common.Gpt()
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
    wrapper = inprocess.Wrapper(
        store_kwargs={"port": port + 1},
        abort=AbortGloo(),
        monitor_process_pidfile=str(options.events / "monitor_{rank}.pid"),
        **(tuned() if options.tuned else {}),
    )
    os.environ["LOCAL_RANK"] = local_rank
    wrapper(train)(options, log, model, common.optimizer_of(model), store)


if __name__ == "__main__":
    main()
