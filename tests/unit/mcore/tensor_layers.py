"""Megatron's GPT on 1, 2, 3 and 4 ranks of a launch with another tensor-parallel size: losses and gradients.

    python tests/unit/mcore/tensor_layers.py OUT.json

Parameters are read by overlaps from the shards of the launch, and gradients are added by overlaps into them. Each case
first runs as launched, then in cells of each size, in pipelines of two cells of different size, and as launched
again. The batch goes through two segments, with dropout 0.1 at every site. Written for ``test_tensor_layers.py``; ranks
are forked after one import.
"""

from __future__ import annotations

import json
import sys
import zlib
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tests.unit.small_gpt import VOCABULARY, answers_of, gpt_config

# isort: split

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.module import Float16Module

from megatron.elastic.engine.compute.dropout import DropoutKey, dropout_scope
from megatron.elastic.engine.compute.model_interface import CellPlace, LossOutput, UnitParameter, place_of
from megatron.elastic.engine.compute.sequence_cut import SequenceCut
from megatron.elastic.engine.compute.sequence_transfers import Transfer, boundary_transfers
from megatron.elastic.mcore.model import vocabulary_range
from megatron.elastic.mcore.model.dropout import key_dropout
from megatron.elastic.mcore.model.gpt import GptInterface
from megatron.elastic.mcore.model.param_groups import GroupKeys
from megatron.elastic.mcore.patching.patches import Patch, apply
from megatron.elastic.plan.model import Piece
from megatron.elastic.state.coverage import Overlap, Position, add, common_shard, read

WORLD, LAYERS, ROWS, HEADS, COLUMNS, DROPOUT = 4, 2, 2, 8, 40, 0.1
UNITS = LAYERS + 2
SEGMENTS = ((0, 2), (2, UNITS))
SIZES = (1, 2, 3, 4)
PIPELINES = ((3, 1), (1, 2))
"""Sizes of two cells that hold a segment each."""
SCOPE = DropoutKey(7, 5, tuple(range(ROWS)))

Key = tuple[int, int, str]
"""(unit, shard, name)."""


@dataclass(frozen=True)
class Case:
    """One model."""

    tensor_parallel: int
    groups: int
    gated: bool
    bias: bool
    qk_norm: bool
    tied: bool
    bf16: bool
    rotary: bool
    rms: bool
    sequence: str
    """'whole', or the sequence length with sequence parallelism: '16' is not divided by 3, '12' is."""
    fused: bool
    """True for Megatron's fused cross entropy, which rounds its gradient to bf16."""
    recompute: str
    split: bool
    """True if weight gradients are computed after the input gradients."""
    sinks: bool
    """True if each head has a number that its softmax divides by beside the scores (``--softmax-type learnable``).

    Only in fp32: a rank has so few of them that errors of bf16 do not average out.
    """

    @property
    def sequence_parallel(self) -> bool:
        return self.sequence != "whole"

    @property
    def length(self) -> int:
        return int(self.sequence) if self.sequence_parallel else 16


T, F = True, False

# fmt: off
CASES = (
    #    T  groups gated bias qk tied bf16 rotary rms sequence fused recompute   split sinks
    Case(4, 8,     T,    T,   T, T,   T,   F,     T,  "whole", T,    "full",      F,    F),
    Case(2, 4,     F,    F,   F, F,   F,   T,     T,  "12",    F,    "selective", T,    T),
    Case(4, 2,     T,    T,   F, F,   T,   T,     F,  "16",    F,    "no",        F,    F),
    Case(2, 2,     F,    F,   T, T,   F,   F,     F,  "16",    T,    "no",        T,    T),
    Case(4, 4,     T,    T,   T, T,   T,   T,     F,  "12",    T,    "selective", T,    F),
    Case(2, 8,     F,    F,   F, F,   T,   T,     F,  "whole", F,    "full",      T,    F),
    Case(2, 2,     T,    T,   F, F,   F,   F,     T,  "12",    T,    "full",      F,    F),
    Case(4, 8,     F,    F,   T, F,   F,   F,     T,  "16",    F,    "selective", F,    T),
    Case(4, 4,     T,    F,   T, T,   F,   F,     T,  "whole", F,    "no",        F,    T),
    Case(2, 2,     F,    T,   F, T,   F,   F,     T,  "whole", F,    "selective", T,    F),
    Case(2, 4,     T,    T,   F, F,   F,   T,     F,  "16",    T,    "full",      T,    F),
    Case(4, 8,     T,    T,   F, T,   F,   T,     T,  "12",    T,    "no",        T,    F),
    Case(1, 4,     T,    T,   T, T,   F,   T,     T,  "whole", F,    "no",        F,    T),
)
# fmt: on
"""Each pair of values, but for sinks, occurs in one case at least (``test_tensor_layers.py``); the last launch has one
rank."""


def launched(case: Case, groups: Mapping[tuple[int, ...], dist.ProcessGroup]) -> GptInterface:
    """The interface of this rank's whole model, as Megatron built it. ``groups``: those of cells, by their ranks."""
    config = gpt_config(
        case,
        LAYERS,
        DROPOUT,
        None if case.recompute == "no" else case.recompute,
        torch.bfloat16 if case.bf16 else torch.float32,
        num_attention_heads=HEADS,
        num_query_groups=case.groups,
        ffn_hidden_size=COLUMNS,
        gated_linear_unit=case.gated,
        add_bias_linear=case.bias,
        qk_layernorm=case.qk_norm,
        normalization="RMSNorm" if case.rms else "LayerNorm",
        cross_entropy_loss_fusion=case.fused,
        softmax_type="learnable" if case.sinks else "vanilla",
    )
    model: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=case.qk_norm, normalization=config.normalization),
        VOCABULARY,
        case.length,
        position_embedding_type="rope" if case.rotary else "learned_absolute",
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
    return GptInterface([chunk], args, keys, reads_data=True, tensor_group=groups.__getitem__)


class Computed(Protocol):
    """The model of a case, as far as a cell needs to know it."""

    @property
    def tensor_parallel(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def split(self) -> bool: ...

    @property
    def tied(self) -> bool: ...

    @property
    def sequence_parallel(self) -> bool: ...


class Cell:
    """One rank's model at one position, with the shards of the launch around it."""

    def __init__(self, case: Computed, interface: GptInterface) -> None:
        self.case, self.interface = case, interface
        self.launch = Position(parallel_state.get_tensor_model_parallel_rank(), case.tensor_parallel)

    def items(self) -> list[tuple[int, UnitParameter, tuple[Overlap, ...]]]:
        """Every parameter with its unit and overlaps; as launched it is one whole overlap."""
        found = []
        for unit in self.interface.held_units():
            for item in self.interface.unit_parameters(unit):
                whole = tuple((0, size) for size in item.spec.shape)
                shard = self.launch.index if item.spec.sharded else common_shard(self.case.tensor_parallel)
                found.append((unit, item, item.overlaps or (Overlap(shard, whole, whole),)))
        return found

    def fill(self) -> None:
        """Read every parameter from the launch's shards. One that was given up gets storage again."""
        for unit, item, overlaps in self.items():
            if item.parameter.numel() == 0:
                sides = zip(*(overlap.local for overlap in overlaps), strict=True)
                item.parameter.data = item.parameter.data.new_empty([max(b for _, b in side) for side in sides])
            read(overlaps, item.parameter, lambda shard, unit=unit, item=item: value(unit, shard, item))  # type: ignore[misc]

    def run(self, position: Position, group: dist.ProcessGroup) -> dict[str, Any]:
        """Loss of the batch, and the gradients of all shards from all ranks of the cell."""
        self.clear()
        kept: list[tuple[torch.Tensor, torch.Tensor | None, tuple[int, int]]] = []
        at: torch.Tensor | None = None
        for units in SEGMENTS:
            source = None if at is None else at.detach().requires_grad_(True)
            at = self.forward(units, source)
            kept.append((at, source, units))
        gradient: torch.Tensor | None = None
        for output, source, units in reversed(kept):
            self.backward(units, output, gradient)
            gradient = None if source is None else source.grad
        gradients = self.contributions(position)
        for tensor in gradients.values():
            dist.all_reduce(tensor, group=group)
        return {"loss": float(kept[-1][0]), "gradients": gradients}

    def clear(self) -> None:
        """Drop the gradients of a former run."""
        for _, item, _ in self.items():
            item.parameter.grad = None

    def forward(self, units: tuple[int, int], source: torch.Tensor | None) -> torch.Tensor:
        """The output of a segment for the batch, or the loss."""
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(0, VOCABULARY, (ROWS, self.case.length + 1), generator=generator)
        positions = torch.arange(self.case.length).unsqueeze(0).expand(ROWS, -1)
        mask = torch.ones(self.case.length, self.case.length).triu(1).bool().expand(ROWS, 1, -1, -1)

        def step(_: Any, model: Any) -> Any:
            output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
            return output, lambda losses: (losses.float().sum(), torch.tensor(losses.numel()), {})

        with dropout_scope(SCOPE), self.deferring(units):
            output = self.interface.forward(step, piece(units), place_of(*units, UNITS), source, iter(()))
        return output.loss if isinstance(output, LossOutput) else output

    def backward(self, units: tuple[int, int], output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Backward of a segment; deferred weight gradients are formed afterwards."""
        with dropout_scope(SCOPE), self.deferring(units) as queue:
            torch.autograd.backward(output, gradient)
        if queue is not None:
            assert len(queue) > 0
            queue.run(accumulate)

    def deferring(self, units: tuple[int, int]) -> Any:
        """A context in which weight gradients are deferred, if the case splits its backward."""
        return self.interface.deferring(piece(units)) if self.case.split else nullcontext()

    def contributions(self, position: Position) -> dict[Key, torch.Tensor]:
        """This rank's contributions to the gradients of the launch's shards."""
        views: dict[int, list[torch.Tensor]] = {unit: [] for unit in self.interface.held_units()}
        for unit, item, _ in self.items():
            assert item.parameter.grad is not None, f"{item.spec.name} has no gradient"
            views[unit].append(item.parameter.grad.float())
        self.interface.finish_gradients(views)
        flat = [view for unit in views for view in views[unit]]
        tensor, found = self.case.tensor_parallel, dict[Key, torch.Tensor]()
        for (unit, item, overlaps), view in zip(self.items(), flat, strict=True):
            shards = range(tensor) if item.spec.sharded else [common_shard(tensor)]
            whole = {shard: torch.zeros(item.spec.shape) for shard in shards}
            if item.spec.sharded or position.index == 0:
                add(overlaps, view, whole.__getitem__)
            found |= {(unit, shard, item.spec.name): part for shard, part in whole.items()}
        return found


def piece(units: tuple[int, int]) -> Piece:
    return Piece(0, 0, *units, tuple(range(ROWS)))


def pipeline(cell: Cell, sizes: tuple[int, int], keys: Mapping[Key, torch.Tensor]) -> dict[str, Any]:
    """Loss and gradients of the batch through a cell of each size, which hold one segment each.

    The first ranks of the world are the first cell's, and the next ones the second's; the others contribute zeros.
    """
    first, second = sizes
    rank, parallel = dist.get_rank(), cell.case.sequence_parallel
    number = int(rank >= first)
    index = rank - number * first
    cut = SequenceCut(cell.case.length, parallel)
    there, back = boundary_transfers(first, second, cut), boundary_transfers(second, first, cut)
    mine: dict[Key, torch.Tensor] = {}
    loss = torch.zeros(())
    if rank < first + second:
        ranks = tuple(range(number * first, number * first + sizes[number]))
        position, units = Position(index, sizes[number]), SEGMENTS[number]
        cell.interface.hold((*range(*units), *([UNITS] if cell.case.tied else [])), CellPlace(ranks, index))
        cell.fill()
        cell.clear()
        shape, dtype = cell.interface.boundary(ROWS)
        if number == 0:
            output = cell.forward(units, None)
            send(there, index, first, output.detach())
            cell.backward(units, output, received(back, index, first, torch.empty(shape, dtype=dtype)))
        else:
            source = received(there, index, 0, torch.empty(shape, dtype=dtype)).requires_grad_(True)
            output = cell.forward(units, source)
            cell.backward(units, output, None)
            assert source.grad is not None
            send(back, index, 0, source.grad)
            loss = output.detach() / second
        mine = cell.contributions(position)
    dist.all_reduce(loss)
    gradients = {key: mine.get(key, torch.zeros_like(tensor)) for key, tensor in keys.items()}
    for tensor in gradients.values():
        dist.all_reduce(tensor)
    return {"loss": float(loss), "gradients": gradients}


def send(transfers: Sequence[Transfer], index: int, base: int, tensor: torch.Tensor) -> None:
    """Send this index's parts of a boundary tensor; ``base``: the first rank of the receiving cell."""
    for item in transfers:
        if item.sender == index:
            ((sent_from, _, number),) = item.stretches
            dist.send(tensor[sent_from : sent_from + number].contiguous(), base + item.receiver)


def received(transfers: Sequence[Transfer], index: int, base: int, tensor: torch.Tensor) -> torch.Tensor:
    """Fill this index's boundary tensor; ``base``: the first rank of the sending cell."""
    for item in transfers:
        if item.receiver == index:
            ((_, put_at, number),) = item.stretches
            part = tensor[put_at : put_at + number].contiguous()
            dist.recv(part, base + item.sender)
            tensor[put_at : put_at + number] = part
    return tensor


def accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """As autograd accumulates."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def value(unit: int, shard: int, item: UnitParameter) -> torch.Tensor:
    """The parameter of a shard of the launch, without rounding in bf16; any rank can make it."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{unit} {shard} {item.spec.name}".encode()))
    drawn = 0.2 * torch.randn(item.spec.shape, generator=generator) + float("norm.weight" in item.spec.name)
    return drawn.bfloat16().float()


def cells(case: Case) -> list[tuple[int, ...]]:
    """The ranks of the cells. Of the launch's size 2 one has ranks of two tensor-parallel groups, in another order."""
    return [(1, 2) if size == case.tensor_parallel == 2 else tuple(range(size)) for size in SIZES]


def compared(run: dict[str, Any], launch: dict[str, Any]) -> dict[str, Any]:
    """The difference of each gradient from the launch's, relative to its largest element; whether all bits are equal.

    In bf16 instead: the error against fp32, relative to the launch's own. A gradient that is zero but for rounding
    (a bias of all keys) is compared with the largest of its unit.
    """
    apart = {}
    for key, found in run["gradients"].items():
        expected = launch["gradients"][key]
        if "exact" in launch:
            exact = launch["exact"]["gradients"][key]
            apart[str(key)] = float((found - exact).norm() / (expected - exact).norm())
            continue
        unit = max((other for at, other in launch["gradients"].items() if at[0] == key[0]), key=largest)
        scale = expected if largest(expected) > 1e-5 * largest(unit) else unit
        apart[str(key)] = largest(found - expected) / largest(scale)
    return {
        "loss": run["loss"],
        "apart": apart,
        "bitwise": run["loss"] == launch["loss"]
        and all(torch.equal(launch["gradients"][key], found) for key, found in run["gradients"].items()),
        "complete": run["gradients"].keys() == launch["gradients"].keys(),
    }


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())


def compute(case: Case) -> dict[str, Any]:
    """The launch's loss, the comparison with it of each cell that this rank belongs to, and of the launch again."""
    apply([Patch(symbol, reason, make) for symbol, reason, make in vocabulary_range.rows()])
    chains = [(tuple(range(a)), tuple(range(a, a + b))) for a, b in PIPELINES]
    named = sorted({*cells(case), *(ranks for both in chains for ranks in both)})
    groups = {ranks: dist.new_group(ranks) for ranks in named}
    own = parallel_state.get_tensor_model_parallel_group()
    before = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        cell = Cell(case, launched(case, groups))
    cell.fill()
    launch = cell.run(cell.launch, own)
    if case.bf16:
        launch["exact"] = in_fp32(case, own)
    found: dict[str, Any] = {"launch": launch["loss"], "smallest": min_of(launch["gradients"].values()), "cells": {}}
    for ranks in cells(case):
        if dist.get_rank() in ranks:
            place = CellPlace(ranks, ranks.index(dist.get_rank()))
            found["cells"][len(ranks)] = in_cell(cell, place, groups[ranks], launch)
    found["pipelines"] = [compared(pipeline(cell, sizes, launch["gradients"]), launch) for sizes in PIPELINES]
    cell.interface.hold(range(UNITS + case.tied))
    cell.fill()
    found["again"] = compared(cell.run(cell.launch, own), launch)
    found["random state kept"] = bool(torch.equal(before, torch.get_rng_state()))
    return found


def in_fp32(case: Case, own: dist.ProcessGroup) -> dict[str, Any]:
    """Loss and gradients of the launch with the same parameters in fp32."""
    with torch.random.fork_rng(devices=[]):
        cell = Cell(case, launched(replace(case, bf16=False), {}))
    cell.fill()
    return cell.run(cell.launch, own)


def in_cell(cell: Cell, place: CellPlace, group: dist.ProcessGroup, launch: dict[str, Any]) -> dict[str, Any]:
    """The comparison of one cell that holds the whole model, and what the interface says of it."""
    interface, units, position = cell.interface, range(UNITS + cell.case.tied), place.position
    if position.count > 2:
        interface.prepare(units, place)
    interface.hold(units, place)
    cell.fill()
    boundary, _ = interface.boundary(ROWS)
    named = {
        (unit, overlap.shard) for unit, item, overlaps in cell.items() if item.spec.sharded for overlap in overlaps
    }
    return {
        **compared(cell.run(position, group), launch),
        "shapes": {item.spec.name: list(item.parameter.shape) for unit, item, _ in cell.items() if unit == 1},
        "boundary": boundary[0],
        "covered": named == {(unit, shard) for unit in units for shard in interface.covered(unit, position)},
    }


def min_of(gradients: Iterable[torch.Tensor]) -> float:
    """The least of the gradients' largest elements: no parameter has a gradient of zeros."""
    return min(map(largest, gradients))


if __name__ == "__main__":
    answers = [{"case": asdict(case), "ranks": answers_of(case, compute, WORLD)} for case in CASES]
    Path(sys.argv[1]).write_text(json.dumps(answers))
