"""A model whose ranks share experts: each unit adds, to that of :mod:`shared_model`, an expert's product of a position.

A position goes to an expert by its number and the unit's, so choices depend on no rounding; one expert has half of all.
An expert is a matrix, of which each of several ranks may have some columns. The ranks of a crew exchange positions with
sums: each sets its own ones into a tensor of all, and every home multiplies what its experts receive. A rank without
samples sets none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.compute.model_interface import CellPlace, UnitParameter
from megatron.elastic.engine.compute.sequence_cut import length_of
from megatron.elastic.plan.model import Piece
from megatron.elastic.state.layout import ParamSpec
from tests.cluster.cut_model import Mapped
from tests.cluster.model import LENGTH, WIDTH
from tests.cluster.shared_model import SharedModel

__all__ = ["EXPERTS", "RoutedModel"]

EXPERTS = 4
CHOICES = torch.tensor([[0, 1, 1, 2], [3, 1, 0, 1]])
"""By units of even and odd numbers, and position: the expert."""
ROWS = 1
"""Rows of a piece that has any."""


class RoutedModel(SharedModel):
    """Implements :class:`ModelInterface` for layers with experts, each cut over ``cut`` adjacent ranks of a cell."""

    def __init__(self, units: int, held: Collection[int], place: CellPlace, fabric: Fabric, cut: int) -> None:
        super().__init__(units, held, place, fabric)
        self._cut, self._launched = cut, len(place.ranks)
        self._sent: dict[int, torch.Tensor] = {}
        """Unit → positions that this rank sent to each expert."""
        self._experts = {
            unit: {expert: torch.nn.Parameter(self._initial(unit, expert)) for expert in self._mine} for unit in held
        }

    @property
    def _rank(self) -> int:
        return self._place.ranks[self._place.index]

    @property
    def _mine(self) -> tuple[int, ...]:
        """The experts of this rank."""
        return () if self._place.crew is None else self._place.crew.experts_of(self._rank)

    @property
    def _columns(self) -> slice:
        each, part = WIDTH // self._cut, self._place.index % self._cut
        return slice(part * each, (part + 1) * each)

    def _initial(self, unit: int, expert: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5000 + EXPERTS * unit + expert)
        return (torch.randn(WIDTH, WIDTH, generator=generator) * WIDTH**-0.5)[:, self._columns].clone()

    def hold(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """See :class:`ModelInterface`."""
        super().hold(units, place)
        kept = self._experts
        self._experts = {
            unit: {
                expert: kept[unit][expert] if expert in kept.get(unit, {}) else self._undefined()
                for expert in self._mine
            }
            for unit in units
        }

    def _undefined(self) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.full((WIDTH, WIDTH // self._cut), float("nan")))

    def largest_part(self, tensor: int, parts: int, parameters: Collection[ParamSpec]) -> int | None:
        """See :class:`ModelInterface`: cells have the launch's size."""
        return super().largest_part(tensor, parts, parameters) if parts == self._launched else None

    def unit_parameters(self, unit: int) -> Sequence[UnitParameter]:
        """See :class:`ModelInterface`."""
        return [
            *super().unit_parameters(unit),
            *(
                UnitParameter(
                    ParamSpec(f"experts.{expert}", it.numel(), tuple(it.shape), sharded=True, expert=expert), it
                )
                for expert, it in self._experts[unit].items()
            ),
        ]

    def ghost(self, piece: Piece, place: tuple[int, int]) -> torch.Tensor:
        """See :class:`ModelInterface`."""
        x = torch.empty(length_of(self._runs), 0, WIDTH, requires_grad=torch.is_grad_enabled())
        for unit in range(piece.first, piece.end):
            x = self._routed(unit, x)
        return x

    def _run(self, unit: int, x: torch.Tensor) -> torch.Tensor:
        return super()._run(unit, x) + self._routed(unit, x)

    def _routed(self, unit: int, x: torch.Tensor) -> torch.Tensor:
        """Return the products of this rank's positions, whichever ranks have their experts."""
        rows, choices = x.shape[1], CHOICES[unit % 2]
        if torch.is_grad_enabled():
            mine = torch.cat([choices[start:stop] for start, stop in self._runs])
            self._sent[unit] = self._sent.get(unit, 0) + rows * torch.bincount(mine, minlength=EXPERTS)
        tokens = Mapped.apply(x, self._spread, lambda gradient: self._collected(gradient, rows))
        received, experts = tokens[..., self._columns], self._experts[unit]
        products = torch.zeros_like(tokens)
        for expert, weight in experts.items():
            products = products + (choices == expert).view(1, LENGTH, 1, 1) * (received @ weight.t())
        return Mapped.apply(products, lambda whole: self._collected(whole, rows), self._spread)  # type: ignore[no-any-return, no-untyped-call]

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        """The positions of all ranks of the crew, ``[ranks, length, ROWS, width]``."""
        whole, at = x.new_zeros((len(self._members), LENGTH, ROWS, WIDTH)), 0
        for start, stop in self._runs if x.shape[1] else ():
            whole[self._members.index(self._rank), start:stop] = x[at : at + stop - start]
            at += stop - start
        return self._over_crew(whole)

    def _collected(self, whole: torch.Tensor, rows: int) -> torch.Tensor:
        """The sum over the crew of this rank's positions."""
        own = self._over_crew(whole)[self._members.index(self._rank)]
        return torch.cat([own[start:stop] for start, stop in self._runs])[:, :rows]

    @property
    def _members(self) -> tuple[int, ...]:
        assert self._place.crew is not None, "a rank without a crew computes nothing"
        return self._place.crew.ranks

    def _over_crew(self, values: torch.Tensor) -> torch.Tensor:
        total = values.clone()
        if len(self._members) > 1:
            dist.all_reduce(total, group=self._fabric.group("crew", self._members))
        return total

    def weigh_layer_losses(self, weight: float) -> None:
        """See :class:`ModelInterface`: no layer has a loss, but each counts positions."""
        self._sent = {}

    def expert_tokens(self) -> Mapping[int, Sequence[int]]:
        """See :class:`ModelInterface`."""
        return {unit: tuple(map(int, sent.tolist())) for unit, sent in self._sent.items()}
