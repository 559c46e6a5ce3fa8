"""torchft: a replica group of one process, as in its own example of fault-tolerant DDP, or of one model's parts.

A replica group of several processes has a process group of its own, and each of its ranks a manager, as in torchft's
HSDP: a rank averages its part's gradients with the same part of the other replica groups.

A replica takes its fixed share of every global batch. torchft calls its sampler lossy: the share of a replica that is
away is computed by none.
"""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from tools.bench.peers_programs import common, parts

GROUP_SECONDS, MANAGER_SECONDS = 5.0, 30.0
"""Time-outs of torchft's example: of the gloo group, and of all other operations."""


def group_of(place: parts.Place) -> dist.ProcessGroup | None:
    """Form the process group of a replica group; None if it is one rank.

    Its ranks notice the loss of another replica group up to a time-out of that group apart, so theirs is longer.
    """
    if place.world == 1:
        return None
    dist.init_process_group("gloo", timeout=timedelta(seconds=MANAGER_SECONDS))
    return dist.group.WORLD


def main() -> None:
    """Train under torchft's manager."""
    options = common.options(__doc__ or "")
    logging.basicConfig(level=logging.WARNING)
    replica, replicas = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    place = parts.Place(options.layout, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))  # in its replica group
    data, part = common.Data.read(options.data), parts.part_of(place, group_of(place))
    model = part.model

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=options.group_timeout or GROUP_SECONDS)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=MANAGER_SECONDS),
        quorum_retries=10 if options.tuned else 0,
        init_sync=False,  # recommended where all replicas begin with the same seed
        hostname="localhost",
    )
    log = common.Log(options.events, replica * place.world + place.rank)
    ranks = replicas * place.world
    while len({path.name.split(".")[0] for path in options.events.glob("rank*.jsonl")}) < ranks:
        time.sleep(0.02)  # so that the first quorum has all of them; a replica that comes back finds the others' logs
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, common.optimizer_of(model))
    while manager.current_step() < options.steps:
        before, began = manager.current_step(), time.time()
        samples = data.rows(before, replica, replicas)
        optimizer.zero_grad()  # begins a quorum
        loss = parallel(samples)
        loss.backward()
        part.finish_gradients()
        optimizer.step()
        if manager.current_step() == before:
            log.write("discarded", step=before + 1, began=began)
            continue
        rows = manager.num_participants() * len(samples)
        own = len(samples) if part.has_loss and manager.is_participating() else 0
        log.step(manager.current_step(), began, rows, own, float(loss.detach()))
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
