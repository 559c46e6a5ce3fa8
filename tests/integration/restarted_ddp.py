"""Data-parallel training under ``torchrun --max-restarts``: a checkpoint each step, and no import of ours.

restarted_ddp.py FOLDER LOST POINT: in the first attempt rank LOST kills itself in step 3, either before its backward,
while the others wait for it in the reduction of the gradients (POINT "reduction"), or between two steps, while they are
in a barrier ("barrier"). A rank that gets an error writes it to FOLDER before it ends.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


def main(folder: Path, lost: int, point: str) -> None:
    """Train, from the newest checkpoint where there is one, and print the sum of the parameters."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("elastic")
    rank, saved = dist.get_rank(), folder / "model.pt"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    done = 0
    if saved.exists():
        done, parameters = torch.load(saved)
        model.load_state_dict(parameters)
    (folder / f"attempt{attempt}.rank{rank}").write_text(str(done))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        batch = torch.randn(4, 8, generator=data)
        if step <= done:
            continue
        dies = (attempt, rank, step) == (0, lost, 3)
        optimizer.zero_grad()
        loss = parallel(batch).square().mean()
        if dies and point == "reduction":
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        if rank == 0:
            torch.save((step, model.state_dict()), folder / "partial.pt")
            os.replace(folder / "partial.pt", saved)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    print(f"rank {rank} of {dist.get_world_size()} on {dist.get_backend()}: {total:.6f}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    try:
        main(target, int(sys.argv[2]), sys.argv[3])
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        (target / f"error{os.environ['TORCHELASTIC_RESTART_COUNT']}.rank{os.environ['RANK']}").write_text(text)
        raise
