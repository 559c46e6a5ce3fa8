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
from functools import partial
from pathlib import Path
from unittest.mock import patch

from tests.unit.small_gpt import LENGTH, VOCABULARY, answers_of, gpt, gpt_config

# isort: split

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec

from megatron.elastic.engine.compute.dropout import DropoutKey, _Mask, dropout_scope
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


def drawn(case: Case, repeated: bool) -> dict[str, list[list[int]]]:
    """(unit, site) of each mask of a model that predicts two further tokens, in forward and in backward."""
    config = gpt_config(case, 2, DROPOUT, case.recompute, mtp_num_layers=2, mtp_use_repeated_layer=repeated)
    further = get_gpt_mtp_block_spec(config, get_gpt_layer_local_spec(), False)
    model = gpt(config, tied=True, mtp_block_spec=further, position_embedding_type="rope").train()
    key_dropout(model, 0)  # as where the sequence is cut
    tokens = torch.arange(2 * (LENGTH + 1)).view(2, LENGTH + 1)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)
    positions = torch.arange(LENGTH).expand(2, -1)
    seen: list[list[int]] = []

    def watched(at: _Mask, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        seen.append([at.unit, at.site])
        return apply(at, x, residual)

    apply = _Mask.apply
    with patch.object(_Mask, "apply", watched), dropout_scope(DropoutKey(7, 5, (1, 2))):
        labels = tokens[:, 1:].contiguous()
        out = model(tokens[:, :-1].contiguous(), positions, mask.expand(2, 1, -1, -1), labels=labels)
        forward = list(seen)
        out.sum().backward()
    return {"forward": forward, "backward": seen[len(forward) :]}


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
    for name, repeated, recompute in (("two", False, None), ("one", True, None), ("one again", True, "full")):
        further = Case(f"further tokens, {name}", recompute=recompute)
        answers.append({"case": asdict(further), **answers_of(further, partial(drawn, repeated=repeated))[0]})
    Path(sys.argv[1]).write_text(json.dumps(answers))
