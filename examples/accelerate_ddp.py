"""Hugging Face Accelerate on the elastic communicator. ``pip install accelerate``.

torchrun --standalone --nproc-per-node 2 examples/accelerate_ddp.py [BACKEND]

On a CPU, Accelerate would choose gloo; it takes a process group that is already there.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

STEPS = 5


def samples(ranks: int) -> list[torch.Tensor]:
    """Return the samples of all steps, [8] each; Accelerate gives each rank its four of a step."""
    sources = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    return [sample for _ in range(STEPS) for source in sources for sample in torch.randn(4, 8, generator=source)]


def main() -> None:
    """Train a small model, each rank on data of its own, and print the sum of the parameters."""
    dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "elastic")
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    loader = DataLoader(samples(accelerator.num_processes), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for batch in loader:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    with torch.no_grad():
        total = sum(float(parameter.double().sum()) for parameter in model.parameters())
    print(
        f"rank {accelerator.process_index} of {accelerator.num_processes} on {dist.get_backend()}: {total:.6f}\n",
        end="",
        flush=True,
    )
    accelerator.end_training()  # destroys the group


if __name__ == "__main__":
    main()
