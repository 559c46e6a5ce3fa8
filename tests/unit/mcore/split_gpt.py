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
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.unit.small_gpt import LENGTH, VOCABULARY, answers_of, gpt, gpt_config

# isort: split

import torch
from megatron.core.models.gpt import GPTModel

from megatron.elastic.engine.compute.dropout import DropoutKey, dropout_scope
from megatron.elastic.mcore.model.split_backward import SplitLinears, WeightQueue

PIECES, ROWS, LATE = 4, 2, 2


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
    dtype = getattr(torch, case.dtype)
    more = {"add_bias_linear": case.bias, "gated_linear_unit": case.gated}
    model = gpt(gpt_config(case, 3, 0.1, case.recompute, dtype, **more), case.tied)
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


def compute(case: Case) -> dict[str, Any]:
    """Digests of gradients: as Megatron computes them, with the switch installed, and split."""
    model = build(case)
    whole(model)
    before = taken(model)
    switch = SplitLinears()
    switch.install(model)
    whole(model)
    installed = taken(model)
    sizes = split(model, switch, [model.shared_embedding_or_output_weight()] if case.tied else [])
    return {"whole": before, "installed": installed, "split": taken(model), "sizes": sizes}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps({case.name: answers_of(case, compute) for case in CASES}))
