"""The same training with sharded parameters (FSDP2) on the elastic communicator.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py [BACKEND]
"""

from __future__ import annotations

import sys
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

STEPS = 5


def main() -> None:
    """Train a small model, each rank on data of its own, and print the sum of the parameters."""
    dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "elastic")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        loss = model(torch.randn(4, 8, generator=data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        whole = [cast(DTensor, parameter).full_tensor() for parameter in model.parameters()]
    total = sum(float(tensor.double().sum()) for tensor in whole)
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()} on {dist.get_backend()}: {total:.6f}\n", end="", flush=True
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
