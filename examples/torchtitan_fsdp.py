"""torchtitan's FSDP2 on the elastic communicator. ``pip install torchtitan triton``.

torchrun --standalone --nproc-per-node 2 examples/torchtitan_fsdp.py [BACKEND]

Model, meshes and sharding are torchtitan's. Several ranks need a backend with ``PREMUL_SUM``, which gloo does not have.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
import torch.distributed as dist
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3Model, llama3_configs, parallelize_llama

STEPS = 5
BATCH = 6  # sequences of all ranks
TOKENS = 16  # of a sequence


def small_llama() -> Llama3Model:
    """Return torchtitan's debug model with two layers, initialized, the same on each rank."""
    config = llama3_configs["debugmodel"](attn_backend="varlen")
    config.layers = config.layers[:2]
    for layer in config.layers:
        # torchtitan's kernels for packed documents need a GPU
        attention = dataclasses.replace(layer.attention, inner_attention=ScaledDotProductAttention.Config())
        attention.rope = dataclasses.replace(attention.rope, max_seq_len=TOKENS)
        layer.attention = attention
    model = config.build()
    torch.manual_seed(0)
    model.init_states()
    return model


def sharded(model: Llama3Model, ranks: int) -> Llama3Model:
    """Return ``model`` with its parameters sharded over all ``ranks`` by torchtitan."""
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    parallel_dims.device_type = "cpu"  # torchtitan looks for accelerators only
    dims = ParallelDims.from_config(parallelism, ranks)
    dims.build_mesh()
    return parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(seq_len=TOKENS, mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )


def main() -> None:
    """Train a small Llama, each rank on its part of one batch, and print the loss a token after the last step."""
    dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "elastic")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = sharded(small_llama(), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = torch.randint(0, 64, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    tokens = batch[rank::ranks]

    def loss() -> torch.Tensor:
        """Return this rank's part of the loss; torchtitan's sharding sums the gradients of all ranks."""
        logits = model(tokens[:, :-1])
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return total / (BATCH * TOKENS)

    for _ in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    with torch.no_grad():
        dist.all_reduce(whole := loss())
    print(f"rank {rank} of {ranks} on {dist.get_backend()}: {float(whole):.6f}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
