"""Plain DDP over gloo, with a checkpoint at every step if asked: the baseline, torchrun's and ft_launcher's program.

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

from tools.bench.peers_programs import common

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


def train(options: argparse.Namespace, heartbeats: Heartbeats | None) -> None:
    """Run the steps that are left."""
    rank, world = dist.get_rank(), dist.get_world_size()
    log, data = common.Log(options.events, rank), common.Data.read(options.data)
    model = common.Gpt()
    optimizer = common.optimizer_of(model)
    first = common.load(options.checkpoint, model, optimizer) if options.checkpoint else 0
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(first, options.steps):
        began = time.time()
        samples = data.rows(step, rank, world)
        optimizer.zero_grad()
        loss = common.backward(model, parallel, samples, world)
        optimizer.step()
        if options.checkpoint and rank == 0:
            common.save(options.checkpoint, model, optimizer, step + 1)
        log.step(step + 1, began, common.ROWS, len(samples), loss)
        if heartbeats is not None:
            heartbeats.beat()


def main() -> None:
    """Join the process group and train."""
    options = common.options(__doc__ or "")
    heartbeats = Heartbeats(options.tuned) if options.heartbeats else None
    seconds = options.group_timeout
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds) if seconds else None)
    train(options, heartbeats)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
