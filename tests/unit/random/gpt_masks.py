"""Megatron's own GPT with sample-keyed dropout: loss and gradients of one batch, split in different ways.

    python tests/unit/random/gpt_masks.py OUT.json

Every case runs the same eight samples through the same weights with dropout 0.3 at all
sites; they differ in tensor parallelism, sequence parallelism, batch split and
recomputation. Written for ``test_dropout_in_gpt.py``; ranks are forked after one import.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.unit.small_gpt import LENGTH, VOCABULARY, answers_of, gpt, gpt_config

# isort: split

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.elastic.engine.compute.dropout import DropoutKey, dropout_scope
from megatron.elastic.mcore.model.dropout import key_dropout

SAMPLES, DROPOUT = 8, 0.3


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


def compute(case: Case) -> dict[str, list[float]]:
    """Loss of each sample, and the sum of squares of some gradients that are whole on every rank."""
    model = gpt(gpt_config(case, 3, case.dropout, case.recompute), tied=True).train()
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
                piece[:, :-1].contiguous(),
                positions.expand(rows, -1),
                mask.expand(rows, 1, -1, -1),
                labels=piece[:, 1:].contiguous(),
            ).sum(1)
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


class FusedAttention(torch.nn.Module):
    """Stands for a vendor's kernel, which has its dropout inside."""


def unkeyed(case: Case) -> list[str]:
    """Names of the modules that keep their own dropout when two layers of the model have such a kernel."""
    model = gpt(gpt_config(case, 3, case.dropout), tied=True)
    for layer in (model.decoder.layers[0], model.decoder.layers[2]):
        layer.self_attention.core_attention = FusedAttention()
    return list(key_dropout(model, 0))


if __name__ == "__main__":
    answers = [{"case": asdict(case), **answers_of(case, compute)[0]} for case in CASES]
    for name, dropout in (("fused", DROPOUT), ("fused, without dropout", 0.0)):
        fused = Case(name, dropout=dropout)
        answers.append({"case": asdict(fused), "unkeyed": answers_of(fused, unkeyed)[0]})
    Path(sys.argv[1]).write_text(json.dumps(answers))
