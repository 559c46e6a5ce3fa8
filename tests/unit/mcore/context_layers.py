"""Megatron's GPT in cells of one to four parts of the sequence: losses and gradients beside those of one rank.

    python tests/unit/mcore/context_layers.py OUT.json

Each case first runs as Megatron computes it, without context parallelism. Then cells of each number of parts compute
it, whether Megatron has built their model for context parallelism or not, and pipelines of two cells of different
size. The batch goes through two segments, with dropout 0.1 at every site.
Written for ``test_context_layers.py``; ranks are forked after one import.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.unit.mcore.tensor_layers import (
    COLUMNS,
    DROPOUT,
    HEADS,
    LAYERS,
    ROWS,
    SCOPE,
    SEGMENTS,
    UNITS,
    Cell,
    Key,
    compared,
    min_of,
    piece,
)
from tests.unit.small_gpt import VOCABULARY, answers_of, gpt_config

# isort: split

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core import utils as core_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.module import Float16Module

from megatron.elastic.engine.compute.dropout import dropout_scope
from megatron.elastic.engine.compute.model_interface import CellPlace, LossOutput, place_of
from megatron.elastic.engine.compute.sequence_cut import taken
from megatron.elastic.engine.compute.sequence_transfers import Transfer, boundary_transfers
from megatron.elastic.mcore.model.context_parallel import ContextParallel
from megatron.elastic.mcore.model.dropout import key_dropout
from megatron.elastic.mcore.model.gpt import GptInterface
from megatron.elastic.mcore.model.param_groups import GroupKeys
from megatron.elastic.mcore.patching.patches import Patch, apply

WORLD = 4
PIPELINES = ((3, 1), (1, 2))
"""Parts of two cells that hold a segment each, without tensor parallelism."""


@dataclass(frozen=True)
class Case:
    """One model."""

    tensor_parallel: int
    groups: int
    positions: str
    """The kind of position embedding."""
    masked: bool
    """True if the batch has an attention mask, in which some tokens do not see those before a document's end."""
    bf16: bool = False
    recompute: str = "no"
    split: bool = False
    length: int = 16
    sequence_parallel: bool = False
    scaled: bool = False
    """True if scores are scaled by the layer's number."""
    tied: bool = False
    late: bool = False
    """True if Megatron has built the model without context parallelism, and cells come to share the sequence later."""


CASES = (
    Case(1, 8, "rope", masked=False),
    Case(1, 2, "rope", masked=True, bf16=True, recompute="selective", tied=True),
    Case(1, 4, "learned_absolute", masked=True, recompute="full", length=18, scaled=True),
    Case(1, 8, "yarn", masked=False, split=True, tied=True),
    Case(2, 2, "rope", masked=True, sequence_parallel=True, recompute="selective"),
    Case(2, 8, "learned_absolute", masked=False, bf16=True, split=True),
    Case(1, 4, "yarn", masked=False, recompute="selective", late=True),
    Case(2, 4, "rope", masked=True, sequence_parallel=True, tied=True, late=True),
)


def launched(case: Case, context: ContextParallel | None, groups: Mapping[tuple[int, ...], Any]) -> GptInterface:
    """The interface of the whole model; without ``context`` it is Megatron's own."""
    config = gpt_config(
        case,
        LAYERS,
        DROPOUT,
        None if case.recompute == "no" else case.recompute,
        torch.bfloat16 if case.bf16 else torch.float32,
        num_attention_heads=HEADS,
        num_query_groups=case.groups,
        ffn_hidden_size=COLUMNS,
        apply_query_key_layer_scaling=case.scaled,
        attention_softmax_in_fp32=True,
        context_parallel_size=1 if context is None or case.late else WORLD // case.tensor_parallel,
    )
    vars(config).update(YARN if case.positions == "yarn" else {})  # read by the model, though no field
    model: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        case.length,
        position_embedding_type=case.positions,
        share_embeddings_and_output_weights=case.tied,
    )
    key_dropout(model, parallel_state.get_tensor_model_parallel_rank())
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    args = Namespace(
        num_layers=LAYERS,
        seq_length=case.length,
        micro_batch_size=ROWS,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
    )
    chunk = Float16Module(config, model) if case.bf16 else model
    keys = GroupKeys(OptimizerConfig(lr=1e-3), None)
    return GptInterface(
        [chunk],
        args,
        keys,
        reads_data=True,
        tensor_group=groups.__getitem__,
        context=context,
        context_group=groups.__getitem__,
    )


YARN: dict[str, Any] = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 8,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}


class ContextCell(Cell):
    """A rank's model at one part of the sequence. The batch is cut as by a user's script."""

    def __init__(self, case: Case, interface: GptInterface) -> None:
        super().__init__(case, interface)
        self.masked, self.whole = case.masked, [0.0, 0.0]

    def forward(self, units: tuple[int, int], source: torch.Tensor | None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        length = self.case.length
        tokens = torch.randint(0, VOCABULARY, (ROWS, length + 1), generator=generator)
        mask = torch.ones(length, length).triu(1).bool().expand(ROWS, 1, -1, -1).clone()
        mask[0, :, length // 2 :, : length // 2] = True
        batch = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "position_ids": torch.arange(length).unsqueeze(0).expand(ROWS, -1),
            "attention_mask": mask if self.masked else None,
        }

        def step(_: Any, model: Any) -> Any:
            mine = core_utils.get_batch_on_this_cp_rank(dict(batch))
            output = model(mine["tokens"], mine["position_ids"], mine["attention_mask"], labels=mine["labels"])

            def loss(losses: torch.Tensor) -> Any:
                total, count = losses.float().sum(), torch.tensor(losses.numel())
                return total, count, {"loss": torch.stack([total.detach(), count.float()])}

            return output, loss

        with dropout_scope(SCOPE), self.deferring(units):
            output = self.interface.forward(step, piece(units), place_of(*units, UNITS), source, iter(()))
        if not isinstance(output, LossOutput):
            return output
        self.whole = output.report["loss"].tolist()
        assert output.tokens is not None and int(output.tokens) == self.whole[1] == ROWS * length
        return output.loss

    def hold(self, units: Sequence[int], place: CellPlace) -> None:
        """Take a place in a cell."""
        self.interface.hold(units, place)
        self.fill()

    def measured(self, place: CellPlace, group: dist.ProcessGroup) -> dict[str, Any]:
        """The loss of the whole batch, and the gradients of all shards from all ranks of the cell."""
        found = self.run(place.position, group)
        return {"loss": self.whole[0], "gradients": found["gradients"]}


def pipeline(cell: ContextCell, sizes: tuple[int, int], keys: Mapping[Key, torch.Tensor]) -> dict[str, Any]:
    """Loss and gradients of the batch through a cell of each size, which hold one segment each.

    The first ranks of the world are the first cell's, and the next ones the second's; the others contribute zeros.
    """
    rank, first = dist.get_rank(), sizes[0]
    number = int(rank >= first)
    index = rank - number * first
    loss, mine = torch.zeros(()), dict[Key, torch.Tensor]()
    if rank < sum(sizes):
        ranks = tuple(range(number * first, number * first + sizes[number]))
        place, units = CellPlace(ranks, index, team=1), SEGMENTS[number]
        cell.hold((*range(*units), *([UNITS] if cell.case.tied else [])), place)
        cell.clear()
        cut = cell.interface.cut_sequence()
        assert cut is not None
        there, back = boundary_transfers(*sizes, cut), boundary_transfers(*reversed(sizes), cut)
        shape, dtype = cell.interface.boundary(ROWS)
        if number == 0:
            output = cell.forward(units, None)
            send(there, index, first, output.detach())
            cell.backward(units, output, receive(back, index, first, torch.empty(shape, dtype=dtype)))
        else:
            source = receive(there, index, 0, torch.empty(shape, dtype=dtype)).requires_grad_(True)
            output = cell.forward(units, source)
            cell.backward(units, output, None)
            assert source.grad is not None
            send(back, index, 0, source.grad)
            loss = torch.tensor(cell.whole[0]) / sizes[1]
        mine = cell.contributions(place.position)
    dist.all_reduce(loss)
    gradients = {key: mine.get(key, torch.zeros_like(tensor)) for key, tensor in keys.items()}
    for tensor in gradients.values():
        dist.all_reduce(tensor)
    return {"loss": float(loss), "gradients": gradients}


def send(transfers: Sequence[Transfer], index: int, base: int, tensor: torch.Tensor) -> None:
    """Send this index's parts of a boundary tensor; ``base``: the first rank of the receiving cell."""
    for item in transfers:
        if item.sender == index:
            runs = [(at, at + number) for at, _, number in item.stretches]
            dist.send(taken(tensor, runs, 0).contiguous(), base + item.receiver)


def receive(transfers: Sequence[Transfer], index: int, base: int, tensor: torch.Tensor) -> torch.Tensor:
    """Fill this index's boundary tensor; ``base``: the first rank of the sending cell."""
    for item in transfers:
        if item.receiver == index:
            runs = [(at, at + number) for _, at, number in item.stretches]
            parts = taken(tensor, runs, 0).contiguous()
            dist.recv(parts, base + item.sender)
            for (start, stop), part in zip(runs, parts.split([b - a for a, b in runs]), strict=True):
                tensor[start:stop] = part
    return tensor


def compute(case: Case) -> dict[str, Any]:
    """The comparison of each cell that this rank belongs to with Megatron's own loss and gradients."""
    tensor = case.tensor_parallel
    cells = [tuple(range(parts * tensor)) for parts in range(1, WORLD // tensor + 1)]
    chains = [(tuple(range(a)), tuple(range(a, a + b))) for a, b in PIPELINES if tensor == 1]
    every = [CellPlace(ranks, i, team=tensor) for ranks in cells for i in range(len(ranks))]
    every += [CellPlace(ranks, i, team=1) for both in chains for ranks in both for i in range(len(ranks))]
    named = {ranks for at in every for ranks in (at.ranks, at.tensor_ranks, at.context_ranks)}
    groups = {ranks: dist.new_group(ranks) for ranks in sorted(named)}
    own = parallel_state.get_tensor_model_parallel_group()
    plain = ContextCell(case, launched(case, None, groups))
    plain.fill()
    launch = plain.measured(CellPlace(tuple(range(tensor)), plain.launch.index), own)
    if case.bf16:
        exact = ContextCell(replace(case, bf16=False), launched(replace(case, bf16=False), None, groups))
        exact.fill()
        launch["exact"] = exact.measured(CellPlace(tuple(range(tensor)), plain.launch.index), own)
    context = ContextParallel()
    apply([Patch(symbol, reason, make) for symbol, reason, make in context.rows()])
    cell = ContextCell(case, launched(case, context, groups))
    found: dict[str, Any] = {"launch": launch["loss"], "smallest": min_of(launch["gradients"].values()), "cells": {}}
    for ranks in cells:
        if dist.get_rank() in ranks:
            place = CellPlace(ranks, ranks.index(dist.get_rank()), team=tensor)
            cell.hold(range(UNITS + case.tied), place)
            assert context.part is not None
            found["cells"][place.parts] = {
                **compared(cell.measured(place, groups[ranks]), launch),
                "runs": context.part.runs,
            }
    found["pipelines"] = [compared(pipeline(cell, sizes, launch["gradients"]), launch) for sizes in PIPELINES if chains]
    return found


if __name__ == "__main__":
    answers = [{"case": asdict(case), "ranks": answers_of(case, compute, WORLD)} for case in CASES]
    Path(sys.argv[1]).write_text(json.dumps(answers))
