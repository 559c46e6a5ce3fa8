"""A model whose units are cut over the ranks of a cell, of any number, as Megatron cuts a layer.

Each unit is ``tanh(x + s · (W2 (h · k)) + c)`` with ``h = tanh(W1 x + b)``: the hidden elements are dealt over the
ranks, so W1 and b are cut by rows and W2 by columns. The factors k belong to groups of hidden elements. Where a cut
runs through a group, several ranks compute with its factor. The gain s and the bias c are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.compute.model_interface import (
    ROW_DIM,
    CellPlace,
    DeferredWeights,
    ForwardStep,
    LossOutput,
    UnitParameter,
)
from megatron.elastic.plan.model import Piece
from megatron.elastic.state.coverage import Overlap, Position
from megatron.elastic.state.layout import ParamSpec
from tests.cluster.model import LENGTH, WIDTH

__all__ = ["HIDDEN", "CutModel", "overlaps", "shape_at_launch", "whole_values"]

HIDDEN, GROUPS = 12, 4
"""Hidden elements of a unit, and groups of them; the launch's tensor-parallel size divides both."""
SHAPES: Mapping[str, tuple[int, ...]] = {
    "w1": (HIDDEN, WIDTH),
    "b": (HIDDEN,),
    "k": (GROUPS,),
    "w2": (WIDTH, HIDDEN),
    "s": (1,),
    "c": (WIDTH,),
}
CUT_DIM: Mapping[str, int] = {"w1": 0, "b": 0, "k": 0, "w2": 1}
"""Parameter → the dimension that is cut; the others are replicated."""


def _interval(name: str, position: Position) -> tuple[int, int]:
    """The indices of the cut dimension with which a rank computes; those of k may be shared with another rank."""
    size, more = divmod(HIDDEN, position.count)
    first = position.index * size + min(position.index, more)
    stop = first + size + (position.index < more)
    if name != "k":
        return first, stop
    each = HIDDEN // GROUPS
    return first // each, -(-stop // each)


def _shape(name: str, position: Position) -> tuple[int, ...]:
    shape = list(SHAPES[name])
    if name in CUT_DIM:
        first, stop = _interval(name, position)
        shape[CUT_DIM[name]] = stop - first
    return tuple(shape)


def shape_at_launch(name: str, tensor: int) -> tuple[int, ...]:
    """The shape of a parameter in one shard, or in the common part."""
    return _shape(name, Position(0, tensor))


def overlaps(name: str, position: Position, tensor: int) -> tuple[Overlap, ...]:
    """The overlaps of a parameter over the shards of a launch of ``tensor`` ranks."""
    shape = _shape(name, position)
    whole = tuple((0, size) for size in shape)
    if name not in CUT_DIM:
        return (Overlap(tensor if tensor > 1 else 0, whole, whole),)
    dim, found = CUT_DIM[name], list[Overlap]()
    first, stop = _interval(name, position)
    for shard in range(tensor):
        begin, end = _interval(name, Position(shard, tensor))
        low, high = max(first, begin), min(stop, end)
        if low < high:
            local, remote = list(whole), list(whole)
            local[dim], remote[dim] = (low - first, high - first), (low - begin, high - begin)
            found.append(Overlap(shard, tuple(local), tuple(remote)))
    return tuple(found)


def whole_values(unit: int, name: str) -> torch.Tensor:
    """The initial values of a whole parameter, a function of its name."""
    generator = torch.Generator().manual_seed(100 * unit + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator) * 0.3 + (name in "ks")


class CutModel:
    """Implements :class:`ModelInterface` for ``units`` units on one rank of a cell; ``place``: that of the launch."""

    def __init__(self, units: int, held: Collection[int], place: CellPlace, fabric: Fabric) -> None:
        self.compute_units = units
        self._fabric = fabric
        self._launched = self._place = place
        self._parameters = {unit: self._built(unit, defined=True) for unit in sorted(held)}

    def _built(self, unit: int, defined: bool) -> dict[str, torch.nn.Parameter]:
        built = {}
        for name in SHAPES:
            values = torch.full(_shape(name, self._place.position), float("nan"))
            if defined and name in CUT_DIM:
                first, stop = _interval(name, self._place.position)
                values = whole_values(unit, name).narrow(CUT_DIM[name], first, stop - first).clone()
            elif defined:
                values = whole_values(unit, name)
            built[name] = torch.nn.Parameter(values)
        return built

    def prepare(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """Nothing takes long here."""

    def hold(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """See :class:`ModelInterface`."""
        place = self._launched if place is None else place
        kept = self._parameters if place == self._place else {}
        self._place = place
        self._parameters = {unit: kept.get(unit) or self._built(unit, defined=False) for unit in sorted(units)}

    def covered(self, unit: int, position: Position) -> tuple[int, ...]:
        """See :class:`ModelInterface`."""
        tensor = len(self._launched.ranks)
        return tuple(sorted({overlap.shard for name in CUT_DIM for overlap in overlaps(name, position, tensor)}))

    def largest_part(self, count: int) -> int | None:
        """See :class:`ModelInterface`."""
        return -(-HIDDEN // count) * 1_000_000 // HIDDEN

    def held_units(self) -> tuple[int, ...]:
        """See :class:`ModelInterface`."""
        return tuple(self._parameters)

    def unit_parameters(self, unit: int) -> Sequence[UnitParameter]:
        """See :class:`ModelInterface`."""
        position, tensor = self._place.position, len(self._launched.ranks)
        regular = position.count == tensor
        items = []
        for name, parameter in self._parameters[unit].items():
            shape = shape_at_launch(name, tensor)
            spec = ParamSpec(name, torch.Size(shape).numel(), shape, sharded=name in CUT_DIM)
            items.append(UnitParameter(spec, parameter, None if regular else overlaps(name, position, tensor)))
        return items

    def boundary(self, rows: int) -> tuple[torch.Size, torch.dtype]:
        """See :class:`ModelInterface`."""
        return torch.Size((LENGTH, rows, WIDTH)), torch.float32

    def activation_bytes(self, unit: int) -> int:
        """See :class:`ModelInterface`."""
        return 8 * LENGTH * WIDTH

    def forward(
        self,
        step: ForwardStep,
        piece: Piece,
        place: tuple[int, int],
        source: torch.Tensor | None,
        batches: Iterator[Any],
    ) -> torch.Tensor | LossOutput:
        """See :class:`ModelInterface`."""
        first, last = piece.first == 0, piece.end == self.compute_units
        batch = next(batches) if first or last else {}
        x = batch["input"].transpose(0, ROW_DIM) if source is None else source
        for unit in range(piece.first, piece.end):
            x = self._unit(self._parameters[unit], x)
        if not last:
            return x
        loss = (x - batch["target"].transpose(0, ROW_DIM)).square().mean(-1).sum()
        tokens = torch.tensor(LENGTH * len(piece.rows))
        return LossOutput(loss, tokens, {"loss": torch.stack([loss.detach(), tokens.float()])})

    def _unit(self, own: Mapping[str, torch.nn.Parameter], x: torch.Tensor) -> torch.Tensor:
        place = self._place
        group = self._fabric.group("tensor", place.ranks) if len(place.ranks) > 1 else None
        first, stop = _interval("w1", place.position)
        factors = torch.arange(first, stop) // (HIDDEN // GROUPS) - _interval("k", place.position)[0]
        h = torch.tanh(torch.nn.functional.linear(_Enter.apply(x, group), own["w1"], own["b"])) * own["k"][factors]
        return torch.tanh(x + own["s"] * _Leave.apply(torch.nn.functional.linear(h, own["w2"]), group) + own["c"])

    def deferring(self, piece: Piece) -> AbstractContextManager[DeferredWeights]:
        """See :class:`ModelInterface`."""
        raise AssertionError("no backward is split here")

    def reads_data(self) -> bool:
        """See :class:`ModelInterface`."""
        return True

    def finish_gradients(self, grads: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Gradients of replicated parameters are equal on all ranks of a cell already."""

    def separate_uses(self, contribute: Callable[[int, str, torch.Tensor], None]) -> None:
        """No weight is shared."""

    def train(self, mode: bool) -> None:
        """Nothing is random."""


class _Enter(torch.autograd.Function):
    """Identity; backward adds the gradients of all ranks of the cell."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _added(gradients[0], ctx.group), None


class _Leave(torch.autograd.Function):
    """The sum over all ranks of the cell; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        return _added(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


def _added(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    total = values.clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total
