"""Plain DDP over gloo, under any layout: the baseline; with a checkpoint at every step torchrun's and ft_launcher's.

With ``--heartbeats`` a rank reports to ft_launcher's rank monitor after every step, and computes the monitor's
time-outs from the first steps unless flags of the launcher gave them.
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.peers_programs import common, parts

OBSERVED = 6
"""Steps from which ft_launcher's time-outs are computed."""


class Heartbeats:
    """Reports to ft_launcher's rank monitor."""

    def __init__(self, tuned: bool) -> None:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        self._client: Any = RankMonitorClient()
        self._client.init_workload_monitoring()
        self._tuned = tuned
        self._beats = 0

    def beat(self) -> None:
        """Report; once, after some steps, compute the time-outs that flags did not give."""
        self._client.send_heartbeat()
        self._beats += 1
        if self._beats == OBSERVED and not self._tuned:
            self._client.calculate_and_set_hb_timeouts()


def train(options: argparse.Namespace, timeout: timedelta | None, heartbeats: Heartbeats | None) -> None:
    """Run the steps that are left."""
    place = parts.Place(options.layout, dist.get_rank(), dist.get_world_size())
    log, data = common.Log(options.events, place.rank), common.Data.read(options.data)
    inside, across = parts.groups_of(place, timeout)
    part = parts.part_of(place, inside)
    optimizer = common.optimizer_of(part.model)
    checkpoints = parts.Checkpoints(options.checkpoints, place) if options.checkpoints else None
    first = checkpoints.load(part.model, optimizer) if checkpoints else 0
    parallel = torch.nn.parallel.DistributedDataParallel(part.model, process_group=across)
    for step in range(first, options.steps):
        began = time.time()
        samples = data.rows(step, place.replica, place.replicas)
        optimizer.zero_grad()
        loss = parts.backward(part, parallel, samples, place.replicas)
        optimizer.step()
        if checkpoints and place.replica == 0:
            checkpoints.save(part.model, optimizer, step + 1)
        log.step(step + 1, began, common.ROWS, len(samples) if part.has_loss else 0, loss)
        if heartbeats is not None:
            heartbeats.beat()


def main() -> None:
    """Join the process group and train."""
    options = common.options(__doc__ or "")
    heartbeats = Heartbeats(options.tuned) if options.heartbeats else None
    timeout = timedelta(seconds=options.group_timeout) if options.group_timeout else None
    dist.init_process_group("gloo", timeout=timeout)
    train(options, timeout, heartbeats)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
