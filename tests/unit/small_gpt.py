"""Common parts of tests that compute with Megatron's own GPT: a small model on CPU, and one forked process a rank.

For scripts of their own, run after this import: it redirects CUDA for the whole process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from megatron.elastic.platform.select import select

select("cpu").prepare()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.elastic.mcore.model.dropout import key_dropout
from megatron.elastic.mcore.model.norms import make_wrapped_norm

WrappedTorchNorm.__new__ = make_wrapped_norm(WrappedTorchNorm.__new__)  # type: ignore[method-assign]

__all__ = ["LENGTH", "VOCABULARY", "answers_of", "gpt", "gpt_config"]

LENGTH, VOCABULARY = 16, 64


class Parallel(Protocol):
    """A case of a test: a frozen dataclass."""

    @property
    def tensor_parallel(self) -> int:
        """Ranks that compute it."""

    @property
    def sequence_parallel(self) -> bool:
        """True if they share the positions of the parts that tensor parallelism leaves whole."""


C = TypeVar("C", bound=Parallel)


def gpt_config(
    case: Parallel,
    layers: int,
    dropout: float,
    recompute: str | None = None,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> TransformerConfig:
    """``recompute``: 'full', 'selective' or None; ``more``: further fields, also those of layers of many shapes."""
    full = recompute == "full"
    fields: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "use_cpu_initialization": True,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "tensor_model_parallel_size": case.tensor_parallel,
        "sequence_parallel": case.sequence_parallel,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "native",
        "recompute_granularity": recompute,
        "recompute_method": "uniform" if full else None,
        "recompute_num_layers": 1 if full else None,
    }
    varied = "heterogeneous_layers_config_encoded_json" in more
    return (HeterogeneousTransformerConfig if varied else TransformerConfig)(**(fields | more))


def gpt(config: TransformerConfig, tied: bool, **more: Any) -> GPTModel:
    """The model of a configuration, with sample-keyed dropout at every site. ``more``: further arguments."""
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        LENGTH,
        share_embeddings_and_output_weights=tied,
        **{"position_embedding_type": "learned_absolute", **more},
    )
    assert key_dropout(model, parallel_state.get_tensor_model_parallel_rank()) == ()
    return model


def answers_of(case: C, compute: Callable[[C], Any], world: int | None = None) -> list[Any]:
    """Return the values of ``compute(case)`` (as JSON) on each of the case's ranks, from the same random state.

    ``world``: number of ranks, if more than the tensor-parallel size: several tensor-parallel groups.
    """
    world = case.tensor_parallel if world is None else world
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks: Sequence[Any] = [
            fork.Process(target=_rank, args=(case, compute, rank, world, folder)) for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]


def _rank(case: C, compute: Callable[[C], Any], rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store)
    parallel_state.initialize_model_parallel(case.tensor_parallel)
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    Path(folder, f"{rank}.json").write_text(json.dumps(compute(case)))
    dist.barrier()
    os._exit(0)
