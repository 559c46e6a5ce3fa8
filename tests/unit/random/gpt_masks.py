"""Megatron's own GPT with sample-keyed dropout: loss and gradients of one batch, split in different ways.

    python tests/unit/random/gpt_masks.py OUT.json

Every case runs the same eight samples through the same weights with dropout 0.3 at all
sites; they differ in tensor parallelism, sequence parallelism, batch split and
recomputation. Written for ``test_dropout_in_gpt.py``; ranks are forked after one import.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.elastic.platform.select import select

select("cpu").prepare()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron.elastic.engine.dropout import DropoutKey, dropout_scope  # noqa: E402
from megatron.elastic.mcore.dropout import key_dropout  # noqa: E402
from megatron.elastic.mcore.norms import make_wrapped_norm  # noqa: E402

SAMPLES, LENGTH, VOCABULARY, DROPOUT = 8, 16, 64, 0.3


@dataclass(frozen=True)
class Case:
    """One way to compute the batch."""

    name: str
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    pieces: tuple[int, ...] = (8,)
    recompute: str | None = None
    dropout: float = DROPOUT
    step: int = 5


CASES = (
    Case("whole"),
    Case("alone", pieces=(1,) * 8),
    Case("ragged", pieces=(3, 1, 4)),
    Case("recompute full", recompute="full"),
    Case("recompute selective", recompute="selective"),
    Case("tp2", tensor_parallel=2),
    Case("tp2 sp", tensor_parallel=2, sequence_parallel=True),
    Case("tp2 sp ragged recompute", tensor_parallel=2, sequence_parallel=True, pieces=(3, 1, 4), recompute="full"),
    Case("next step", step=6),
    Case("without dropout", dropout=0.0),
)


def build(case: Case) -> GPTModel:
    """The model of a case; the same weights in every case."""
    full = case.recompute == "full"
    config = TransformerConfig(
        num_layers=3, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, use_cpu_initialization=True,
        hidden_dropout=case.dropout, attention_dropout=case.dropout, tensor_model_parallel_size=case.tensor_parallel,
        sequence_parallel=case.sequence_parallel, pipeline_dtype=torch.float32, add_bias_linear=True,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="native", recompute_granularity=case.recompute,
        recompute_method="uniform" if full else None, recompute_num_layers=1 if full else None,
    )  # fmt: skip
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = GPTModel(
        config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    )  # fmt: skip
    assert key_dropout(model, parallel_state.get_tensor_model_parallel_rank()) == ()
    model.train()
    return model


def compute(case: Case) -> dict[str, list[float]]:
    """Loss of each sample, and the sum of squares of some gradients that are whole on every rank."""
    model = build(case)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)
    losses: list[float] = []
    first = 0
    for rows in case.pieces:
        piece = tokens[first : first + rows]
        with dropout_scope(DropoutKey(7, case.step, tuple(range(100 + first, 100 + first + rows)))):
            each = model(
                piece[:, :-1].contiguous(), positions.expand(rows, -1), mask.expand(rows, 1, -1, -1),
                labels=piece[:, 1:].contiguous(),
            ).sum(1)  # fmt: skip
            each.sum().backward()
        losses += each.tolist()
        first += rows
    grads = []
    for name, parameter in model.named_parameters():
        if name.endswith(("layernorm.weight", "position_embeddings.weight")):
            grad = parameter.grad.clone()
            if case.sequence_parallel and name.endswith("layernorm.weight"):
                dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
            grads.append(float(grad.double().norm()))
    return {"losses": losses, "grads": grads}


def run_rank(case: Case, rank: int, folder: str) -> None:
    """One forked rank; rank 0 writes the answer."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", case.tensor_parallel)
    dist.init_process_group("gloo", rank=rank, world_size=case.tensor_parallel, store=store)
    parallel_state.initialize_model_parallel(case.tensor_parallel)
    answer = compute(case)
    if rank == 0:
        Path(folder, "answer.json").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)


def main() -> None:
    WrappedTorchNorm.__new__ = make_wrapped_norm(WrappedTorchNorm.__new__)  # type: ignore[method-assign]
    answers = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            context = multiprocessing.get_context("fork")
            ranks = [context.Process(target=run_rank, args=(case, r, folder)) for r in range(case.tensor_parallel)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
            answers.append({"case": asdict(case), **json.loads(Path(folder, "answer.json").read_text())})
    Path(sys.argv[1]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
