"""Data-parallel training on the elastic communicator, without an import of this package.

torchrun --standalone --nproc-per-node 2 examples/ddp.py [BACKEND]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


def main() -> None:
    """Train a small model, each rank on data of its own, and print the sum of the parameters."""
    dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "elastic")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        loss = model(torch.randn(4, 8, generator=data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        total = sum(float(parameter.double().sum()) for parameter in model.parameters())
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()} on {dist.get_backend()}: {total:.6f}\n", end="", flush=True
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
