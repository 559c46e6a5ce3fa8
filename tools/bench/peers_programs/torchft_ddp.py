"""torchft: a replica group of one process, as in its own example of fault-tolerant DDP.

A replica takes its fixed share of every global batch. torchft calls its sampler lossy: the share of a replica that is
away is computed by none.
"""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from tools.bench.peers_programs import common

GROUP_SECONDS, MANAGER_SECONDS = 5.0, 30.0
"""Time-outs of torchft's example: of the gloo group, and of all other operations."""


def main() -> None:
    """Train under torchft's manager."""
    options = common.options(__doc__ or "")
    logging.basicConfig(level=logging.WARNING)
    replica, replicas = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    data, model = common.Data.read(options.data), common.Gpt()

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
    log = common.Log(options.events, replica)
    while len({path.name.split(".")[0] for path in options.events.glob("rank*.jsonl")}) < replicas:
        time.sleep(0.02)  # so that the first quorum has all of them; a replica that comes back finds the others' logs
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, common.optimizer_of(model))
    while manager.current_step() < options.steps:
        before, began = manager.current_step(), time.time()
        samples = data.rows(before, replica, replicas)
        optimizer.zero_grad()  # begins a quorum
        loss = parallel(samples)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), common.CLIP)
        optimizer.step()
        if manager.current_step() == before:
            log.write("discarded", step=before + 1, began=began)
            continue
        rows = manager.num_participants() * len(samples)
        own = len(samples) if manager.is_participating() else 0
        log.step(manager.current_step(), began, rows, own, float(loss.detach()))
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
