"""A model whose ranks share experts: each unit adds, to that of :mod:`shared_model`, an expert's product of a position.

A position goes to an expert by its number and the unit's, so choices depend on no rounding; one expert has half of all.
An expert is a matrix, of which each of several ranks may have some columns, and which several homes may have. The
ranks of a crew exchange positions with sums: each sets its own ones into a tensor of all, and every home multiplies
what its experts receive. A rank without samples sets none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.compute.model_interface import CellPlace, UnitParameter
from megatron.elastic.engine.compute.sequence_cut import Run, length_of
from megatron.elastic.plan.model import Piece
from megatron.elastic.state.layout import ParamSpec
from tests.cluster.cut_model import Mapped
from tests.cluster.model import LENGTH, WIDTH, UnitChain
from tests.cluster.shared_model import SharedModel

__all__ = ["EXPERTS", "RoutedModel", "Routing"]

EXPERTS = 4
CHOICES = torch.tensor([[0, 1, 1, 2], [3, 1, 0, 1]])
"""By units of even and odd numbers, and position: the expert."""
ROWS = 1
"""Rows of a piece that has any."""


class Routing(UnitChain):
    """The experts of one rank, and the exchange of positions in its crew; a base of models."""

    _place: CellPlace
    _fabric: Fabric
    _runs: tuple[Run, ...]
    """The positions that this rank holds."""

    def _begin_routing(self, held: Collection[int]) -> None:
        """Make the experts of the launch, with their initial values."""
        self._sent: dict[int, torch.Tensor] = {}
        """Unit → positions that this rank sent to each expert."""
        self._experts = {
            unit: {
                expert: torch.nn.Parameter(_whole_expert(unit, expert)[:, self._columns].clone())
                for expert in self._mine
            }
            for unit in held
        }

    def _hold_experts(self, units: Collection[int], kept: Mapping[int, Mapping[int, torch.nn.Parameter]]) -> None:
        """Have the experts of the present place. ``kept``: those that stay; the values of others are undefined."""
        self._experts = {
            unit: {
                expert: kept[unit][expert] if expert in kept.get(unit, {}) else self._undefined()
                for expert in self._mine
            }
            for unit in units
        }

    def _undefined(self) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.full((WIDTH, WIDTH), float("nan"))[:, self._columns].clone())

    @property
    def _rank(self) -> int:
        return self._place.ranks[self._place.index]

    @property
    def _mine(self) -> tuple[int, ...]:
        """The experts of this rank."""
        return () if self._place.crew is None else self._place.crew.experts_of(self._rank)

    @property
    def _columns(self) -> slice:
        """The columns of its experts that this rank has."""
        assert self._place.crew is not None
        part = self._place.crew.part_of(self._rank)
        each = WIDTH // part.count
        return slice(part.index * each, (part.index + 1) * each)

    @property
    def _routed_runs(self) -> tuple[Run, ...]:
        """The positions that this rank routes."""
        return self._runs

    def ghost(self, piece: Piece, place: tuple[int, int]) -> torch.Tensor:
        """See :class:`ModelInterface`."""
        needs_gradient = torch.is_grad_enabled() and piece.first > 0  # samples need none, so no rank sends any back
        x = torch.empty(length_of(self._runs), 0, WIDTH, requires_grad=needs_gradient)
        for unit in range(piece.first, piece.end):
            x = self._routed(unit, x)
        return x

    def _routed(self, unit: int, x: torch.Tensor) -> torch.Tensor:
        """Return the products of the positions that this rank routes, whichever ranks have their experts; else zero."""
        rows, choices = x.shape[1], CHOICES[unit % 2]
        if torch.is_grad_enabled():
            mine = choices[list(_positions(self._routed_runs))]
            self._sent[unit] = self._sent.get(unit, 0) + rows * torch.bincount(mine, minlength=EXPERTS)
        tokens = Mapped.apply(x, self._spread, lambda gradient: self._collected(gradient, rows))
        received, experts = tokens[..., self._columns], self._experts[unit]
        products = torch.zeros_like(tokens)
        for expert, weight in experts.items():
            products = products + self._received(expert, choices) * (received @ weight.t())
        return Mapped.apply(products, lambda whole: self._collected(whole, rows), self._spread)  # type: ignore[no-any-return, no-untyped-call]

    def _received(self, expert: int, choices: torch.Tensor) -> torch.Tensor:
        """Whether this home of an expert receives a position of a rank, ``[ranks, length, 1, 1]``.

        Of an expert with replicas, each receives every n-th of the positions.
        """
        crew = self._place.crew
        assert crew is not None
        homes = [number for number, mine in enumerate(crew.homes) if expert in mine]
        turn = homes.index(self._members.index(self._rank) // crew.cut)
        number = torch.arange(len(self._members)).view(-1, 1) + torch.arange(LENGTH)
        return ((choices == expert) & (number % len(homes) == turn)).view(-1, LENGTH, 1, 1)

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        """The positions of all ranks of the crew, ``[ranks, length, ROWS, width]``."""
        whole = x.new_zeros((len(self._members), LENGTH, ROWS, WIDTH))
        if x.shape[1]:
            whole[self._members.index(self._rank), _positions(self._routed_runs)] = x[self._at]
        return self._over_crew(whole)

    def _collected(self, whole: torch.Tensor, rows: int) -> torch.Tensor:
        """The sum over the crew of the positions that this rank routes, at their places among those that it holds."""
        own = self._over_crew(whole)[self._members.index(self._rank)]
        found = own.new_zeros((length_of(self._runs), ROWS, WIDTH))
        found[self._at] = own[_positions(self._routed_runs)]
        return found[:, :rows]

    @property
    def _at(self) -> list[int]:
        """The places of the routed positions among those that this rank holds."""
        held = _positions(self._runs)
        return [held.index(position) for position in _positions(self._routed_runs)]

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


def _positions(runs: Sequence[Run]) -> list[int]:
    return [position for start, stop in runs for position in range(start, stop)]


def _whole_expert(unit: int, expert: int) -> torch.Tensor:
    """The initial values of an expert, a function of its number."""
    generator = torch.Generator().manual_seed(5000 + EXPERTS * unit + expert)
    return torch.randn(WIDTH, WIDTH, generator=generator) * WIDTH**-0.5


class RoutedModel(Routing, SharedModel):
    """Implements :class:`ModelInterface` for layers with experts, in cells of the launch's size."""

    def __init__(self, units: int, held: Collection[int], place: CellPlace, fabric: Fabric) -> None:
        super().__init__(units, held, place, fabric)
        self._launched = len(place.ranks)
        self._begin_routing(held)

    def hold(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """See :class:`ModelInterface`."""
        super().hold(units, place)
        self._hold_experts(units, self._experts)

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

    def _run(self, unit: int, x: torch.Tensor) -> torch.Tensor:
        return super()._run(unit, x) + self._routed(unit, x)
