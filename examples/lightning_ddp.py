"""PyTorch Lightning on the elastic communicator. ``pip install pytorch-lightning``.

torchrun --standalone --nproc-per-node 2 examples/lightning_ddp.py [BACKEND]
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from torch.utils.data import DataLoader

STEPS = 5


class SmallModel(LightningModule):
    """The model of ``examples/ddp.py``, each rank on data of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        data = torch.Generator().manual_seed(self.global_rank)
        return DataLoader([torch.randn(4, 8, generator=data) for _ in range(STEPS)], batch_size=None)


def main() -> None:
    """Train the model, and print the sum of its parameters."""
    torch.manual_seed(0)
    model = SmallModel()
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend=sys.argv[1] if len(sys.argv) > 1 else "elastic"),
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    print(
        f"rank {trainer.global_rank} of {trainer.world_size} on {dist.get_backend()}: {total:.6f}\n", end="", flush=True
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
