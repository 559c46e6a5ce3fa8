"""A model whose units are cut over the ranks of a cell, of any number, as Megatron cuts a layer.

Each unit is ``tanh(x + s · (W2 (h · k)) + c)`` with ``h = tanh(W1 x + b)``: the hidden elements are dealt over the
ranks, so W1 and b are cut by rows and W2 by columns. The factors k belong to groups of hidden elements. Where a cut
runs through a group, several ranks compute with its factor. The gain s and the bias c are replicated.

With ``sequence`` each rank of a cell holds one slice of the positions between the products, where the cell's size
divides them, as under Megatron's sequence parallelism: W1 gets all positions, and the sums of W2 are sliced. Then the
gradients of s and c are partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.compute.model_interface import (
    CellPlace,
    UnitParameter,
)
from megatron.elastic.engine.compute.sequence_cut import SequenceCut
from megatron.elastic.state.coverage import Overlap, Position
from megatron.elastic.state.layout import ParamSpec
from tests.cluster.model import LENGTH, WIDTH, UnitChain

__all__ = ["HIDDEN", "CutModel", "Mapped", "overlaps", "shape_at_launch", "whole_values"]

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


class CutModel(UnitChain):
    """Implements :class:`ModelInterface` for ``units`` units on one rank of a cell; ``place``: that of the launch."""

    def __init__(
        self, units: int, held: Collection[int], place: CellPlace, fabric: Fabric, sequence: bool = False
    ) -> None:
        self.compute_units = units
        self._fabric, self._sequence = fabric, sequence
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
        tensor = len(self._launched.tensor_ranks)
        return tuple(sorted({overlap.shard for name in CUT_DIM for overlap in overlaps(name, position, tensor)}))

    def overlaps(self, spec: ParamSpec, place: CellPlace) -> tuple[Overlap, ...] | None:
        """See :class:`ModelInterface`."""
        tensor = len(self._launched.tensor_ranks)
        return None if place.position.count == tensor else overlaps(spec.name, place.position, tensor)

    def largest_part(self, tensor: int, parts: int, parameters: Collection[ParamSpec]) -> int | None:
        """See :class:`ModelInterface`."""
        return -(-HIDDEN // tensor) * 1_000_000 // HIDDEN if parts == 1 else None

    def held_units(self) -> tuple[int, ...]:
        """See :class:`ModelInterface`."""
        return tuple(self._parameters)

    def unit_parameters(self, unit: int) -> Sequence[UnitParameter]:
        """See :class:`ModelInterface`."""
        tensor = len(self._launched.tensor_ranks)
        items = []
        for name, parameter in self._parameters[unit].items():
            shape = shape_at_launch(name, tensor)
            spec = ParamSpec(name, torch.Size(shape).numel(), shape, sharded=name in CUT_DIM)
            items.append(UnitParameter(spec, parameter, self.overlaps(spec, self._place)))
        return items

    # -- positions of the sequence -------------------------------------------------

    def cut_sequence(self) -> SequenceCut | None:
        """See :class:`ModelInterface`."""
        return SequenceCut(LENGTH, True) if self._sequence else None

    @property
    def _positions(self) -> tuple[int, int]:
        """The positions that this rank holds of a boundary tensor."""
        at = self._place.position
        (run,) = SequenceCut(LENGTH, self._sequence).held(at.index, at.count)
        return run

    @property
    def _sliced(self) -> bool:
        return self._positions != (0, LENGTH)

    def boundary(self, rows: int) -> tuple[torch.Size, torch.dtype]:
        """See :class:`ModelInterface`."""
        start, stop = self._positions
        return torch.Size((stop - start, rows, WIDTH)), torch.float32

    def _slice(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[slice(*self._positions)]

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """The gradient is that of the whole loss on each rank, of which each takes its slice."""
        return Mapped.apply(x, self._gathered, self._slice) if self._sliced else x

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """All positions: slices of other ranks are added to zeros."""
        whole = x.new_zeros((LENGTH, *x.shape[1:]))
        whole[slice(*self._positions)] = x
        return self._added(whole)

    def _added(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the tensor-parallel group."""
        total, ranks = values.clone(), self._place.tensor_ranks
        if len(ranks) > 1:
            dist.all_reduce(total, group=self._fabric.group("tensor", ranks))
        return total

    def finish_gradients(self, grads: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """See :class:`ModelInterface`."""
        for unit in sorted(grads) if self._sliced else ():
            for name, view in zip(self._parameters[unit], grads[unit], strict=True):
                if name not in CUT_DIM:
                    view.copy_(self._added(view))

    def _run(self, unit: int, x: torch.Tensor) -> torch.Tensor:
        place, own = self._place, self._parameters[unit]
        first, stop = _interval("w1", place.position)
        factors = torch.arange(first, stop) // (HIDDEN // GROUPS) - _interval("k", place.position)[0]
        summed = self._summed_slice if self._sliced else self._added
        entered = Mapped.apply(x, self._gathered if self._sliced else _same, summed)
        h = torch.tanh(torch.nn.functional.linear(entered, own["w1"], own["b"])) * own["k"][factors]
        product = torch.nn.functional.linear(h, own["w2"])
        left = Mapped.apply(product, summed, self._gathered if self._sliced else _same)
        return torch.tanh(x + own["s"] * left + own["c"])

    def _summed_slice(self, values: torch.Tensor) -> torch.Tensor:
        return self._slice(self._added(values)).contiguous()


class Mapped(torch.autograd.Function):
    """``forward(x)``, whose gradient is ``backward`` of the output's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        there: Callable[[torch.Tensor], torch.Tensor],
        back: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.back(gradients[0].contiguous()), None, None


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)
