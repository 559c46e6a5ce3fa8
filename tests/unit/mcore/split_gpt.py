"""Gradients of Megatron's own GPT with the backward whole and split, as bytes.

    python tests/unit/mcore/split_gpt.py OUT.json

Each case computes the same micro-batches twice through the same weights: each
backward whole, then forwards and input gradients in 1F1B's order with weight
gradients ``LATE`` micro-batches behind. Written for ``test_split_backward.py``;
ranks are forked after one import.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
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
from megatron.elastic.mcore.split_backward import SplitLinears, WeightQueue  # noqa: E402

PIECES, ROWS, LENGTH, VOCABULARY, LATE = 4, 2, 16, 64, 2


@dataclass(frozen=True)
class Case:
    """One model."""

    name: str
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    tied: bool = False
    recompute: str | None = None
    bias: bool = True
    gated: bool = False
    dtype: str = "float32"


CASES = (
    Case("plain"),
    Case("tied", tied=True),
    Case("no bias, gated", bias=False, gated=True),
    Case("recompute full", recompute="full"),
    Case("recompute selective", recompute="selective"),
    Case("bf16", dtype="bfloat16"),
    Case("tp2", tensor_parallel=2),
    Case("tp2 sp", tensor_parallel=2, sequence_parallel=True),
    Case("tp2 sp tied recompute", tensor_parallel=2, sequence_parallel=True, tied=True, recompute="full"),
)


def build(case: Case) -> GPTModel:
    """The model of a case."""
    full, dtype = case.recompute == "full", getattr(torch, case.dtype)
    config = TransformerConfig(
        num_layers=3, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, use_cpu_initialization=True,
        hidden_dropout=0.1, attention_dropout=0.1, tensor_model_parallel_size=case.tensor_parallel,
        sequence_parallel=case.sequence_parallel, pipeline_dtype=dtype, params_dtype=dtype,
        bf16=case.dtype == "bfloat16", add_bias_linear=case.bias, gated_linear_unit=case.gated,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="native", recompute_granularity=case.recompute,
        recompute_method="uniform" if full else None, recompute_num_layers=1 if full else None,
    )  # fmt: skip
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = GPTModel(
        config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=case.tied,
    )  # fmt: skip
    key_dropout(model, parallel_state.get_tensor_model_parallel_rank())
    model.to(dtype).train()
    return model


def forward(model: GPTModel, number: int) -> torch.Tensor:
    """Summed loss of one micro-batch."""
    generator = torch.Generator().manual_seed(2 + number)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1).expand(ROWS, 1, -1, -1)
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    return model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous()).float().sum()


def scope(number: int):
    """Dropout of one micro-batch."""
    return dropout_scope(DropoutKey(7, 5, tuple(range(number * ROWS, (number + 1) * ROWS))))


def whole(model: GPTModel) -> None:
    """Every backward in one."""
    for number in range(PIECES):
        with scope(number):
            forward(model, number).backward()


def split(model: GPTModel, switch: SplitLinears, tied: list[torch.nn.Parameter]) -> list[int]:
    """Input gradients first; returns how many products each queue held."""
    queues: list[WeightQueue] = []
    sizes: list[int] = []

    def run(number: int) -> None:
        sizes.append(len(queues[number]))
        queues[number].run(lambda parameter, gradient: add(parameter, gradient))

    for number in range(PIECES):
        with scope(number), switch.deferring(tied):
            loss = forward(model, number)
        with scope(number), switch.deferring(tied) as queue:
            loss.backward()
        queues.append(queue)
        if number >= LATE:
            run(number - LATE)
    for number in range(PIECES - LATE, PIECES):
        run(number)
    return sizes


def add(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """As autograd accumulates."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def taken(model: GPTModel) -> dict[str, str]:
    """Digest of every gradient; the gradients are cleared."""
    digests = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.abs().sum() > 0, f"{name} has a gradient of zeros"
        digests[name] = hashlib.sha256(parameter.grad.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        parameter.grad = None
    return digests


def run_rank(case: Case, rank: int, folder: str) -> None:
    """One forked rank writes its answer."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", case.tensor_parallel)
    dist.init_process_group("gloo", rank=rank, world_size=case.tensor_parallel, store=store)
    parallel_state.initialize_model_parallel(case.tensor_parallel)
    model = build(case)
    whole(model)
    before = taken(model)
    switch = SplitLinears()
    switch.install(model)
    whole(model)
    installed = taken(model)
    sizes = split(model, switch, [model.shared_embedding_or_output_weight()] if case.tied else [])
    answer = {"whole": before, "installed": installed, "split": taken(model), "sizes": sizes}
    Path(folder, f"{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)


def main() -> None:
    WrappedTorchNorm.__new__ = make_wrapped_norm(WrappedTorchNorm.__new__)  # type: ignore[method-assign]
    answers = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            context = multiprocessing.get_context("fork")
            ranks = [context.Process(target=run_rank, args=(case, r, folder)) for r in range(case.tensor_parallel)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
            files = [Path(folder, f"{rank}.json") for rank in range(case.tensor_parallel)]
            answers[case.name] = [json.loads(file.read_text()) for file in files]
    Path(sys.argv[1]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
