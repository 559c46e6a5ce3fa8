"""Replicas that torchft's manager keeps together, on the elastic communicator.

A lost replica costs the others one step, and a new one takes its place. torchft is not a requirement of this package:
``pip install torchft``. One lighthouse, then two replicas, each started anew whenever it ends by a failure:

    torchft_lighthouse --min_replicas 1 --bind 127.0.0.1:29510 &
    export TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510
    REPLICA=0 torchrun --standalone --nproc-per-node 1 --max-restarts 3 examples/torchft_ddp.py &
    REPLICA=1 torchrun --standalone --nproc-per-node 1 --max-restarts 3 examples/torchft_ddp.py
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, Optimizer

from megatron.elastic.comm.torchft_group import ProcessGroupElastic

REPLICA = int(os.environ["REPLICA"])
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20


def main() -> None:
    """Train a small model until the replicas have committed ``STEPS`` steps, and print the sum of its parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupElastic(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": sgd.state_dict()},
        min_replica_size=1,
        replica_id=f"replica{REPLICA}",
        timeout=timedelta(seconds=10),
        hostname="localhost",
    )
    averaged, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, sgd)
    data = torch.Generator().manual_seed(REPLICA)
    while manager.current_step() < STEPS:
        optimizer.zero_grad()  # begins a step: the quorum may change here
        averaged(torch.randn(4, 8, generator=data)).square().mean().backward()
        optimizer.step()  # only if all replicas could reduce
        print(f"replica {REPLICA} step {manager.current_step()} with {manager.num_participants()} replicas", flush=True)
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    print(f"replica {REPLICA} ends: {total:.6f}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
