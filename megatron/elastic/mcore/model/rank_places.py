"""The places of one rank: that of the launch, and those that it takes in cells of any sizes.

A place says which part of the weights, of the sequence and of the experts a rank computes, and with which groups. Place
``None`` is that of the launch in the launch's groups: there Megatron's own modules compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.elastic.engine.compute.model_interface import CellPlace, Crew
from megatron.elastic.engine.compute.sequence_cut import SequenceCut
from megatron.elastic.mcore.model.crew_dispatcher import GroupOf
from megatron.elastic.mcore.model.dropout import Slices, launch_slices
from megatron.elastic.mcore.model.expert_homes import cell_crew, join_crew, launch_crew, number_experts, route_over
from megatron.elastic.mcore.model.sequence_gather import SequencePart
from megatron.elastic.mcore.model.tensor_cut import Sizes
from megatron.elastic.mcore.model.tensor_place import TensorPlace
from megatron.elastic.state.coverage import Position

__all__ = ["CellGroups", "RankPlaces"]


@dataclass(frozen=True)
class CellGroups:
    """Functions from ranks to their process group, by the group's purpose; ``None``: this rank has no such groups."""

    tensor: GroupOf | None = None
    """Without it this rank's layers are always those of the launch."""
    crew: GroupOf | None = None
    """Without it layers whose experts ranks share cannot compute."""
    context: GroupOf | None = None
    """Without it cells keep the launch's parts of the sequence."""


class RankPlaces:
    """The places of ``rank``, whose launch has ``sizes`` and Megatron's ``config``."""

    def __init__(self, rank: int, sizes: Sizes, config: Any, groups: CellGroups) -> None:
        self._rank, self._sizes, self._config, self._groups = rank, sizes, config, groups
        self._launched = Position(parallel_state.get_tensor_model_parallel_rank(), sizes.tensor)
        self._launch_mates = _adjacent(rank, sizes.tensor)
        """Ranks of the launch's tensor-parallel group. The group itself has only those that are not lost."""
        crew = launch_crew(sizes.experts, sizes.expert_homes, sizes.expert_parts, rank) if sizes.experts else None
        self.launch_crew: Crew | None = crew
        """This rank's crew as Megatron built it; ``None`` where ranks share no experts."""
        self.cut = self._cut_over(sizes.tensor if config.context_parallel_size > 1 else None)
        """The present cut of the sequence over a cell; ``None``: each rank has all of it."""
        self.launch_part = self._part_at_launch()
        """The part of the sequence that Megatron gives this rank; ``None`` without context parallelism."""
        self.present: TensorPlace | None = None
        self._ranks = self._launch_ranks = sizes.tensor * int(config.context_parallel_size)
        """Ranks of the present cell."""

    def enter(self, built_for: TensorPlace | None, place: CellPlace | None) -> None:
        """Take ``place``, for which layers are :meth:`of` it. ``None``: the cut of the sequence stays."""
        self.present = built_for
        if place is not None:
            self.cut, self._ranks = self._cut_over(place.team), len(place.ranks)

    def number_experts(self, chunks: torch.nn.Module) -> None:
        """Show Megatron's modules the groups in which this rank has experts at launch (:func:`number_experts`)."""
        if self.launch_crew is not None:
            number_experts(chunks, self.launch_crew, self._rank, self._sizes.expert_parts)

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """The present tensor-parallel group."""
        return parallel_state.get_tensor_model_parallel_group() if self.present is None else self.present.group

    def of(self, place: CellPlace | None) -> TensorPlace | None:
        """Return the place that layers are built for; ``None`` if it is that of the launch, in the launch's group."""
        if place is None:
            return None
        rank, group_of = place.ranks[place.index], self._groups.tensor
        if place.position == self._launched:
            group = parallel_state.get_tensor_model_parallel_group()
            if group_of is None or place.tensor_ranks == self._launch_mates:
                if place.crew in (None, self.launch_crew):
                    return None
                return TensorPlace(place.position, group, self._sizes, rank, place.crew, launched=True)
        if group_of is None:
            raise ValueError(f"this rank's layers are those of {self._launched}, not of {place.position}")
        crew, routed = place.crew, self._config.num_moe_experts
        if crew is None and routed:
            crew = cell_crew(routed, place.tensor_ranks)
        return TensorPlace(place.position, group_of(place.tensor_ranks), self._sizes, rank, crew)

    def part_of(self, place: CellPlace | None) -> SequencePart | None:
        """Return the part of the sequence at a place in a cell; ``None``: all of it, as Megatron computes it.

        Modules that Megatron built for context parallelism need a part also where it is all of the sequence.
        """
        launched, group_of = self.launch_part, self._groups.context
        if place is None or group_of is None or (launched is None and place.team is None):
            return launched
        cut = SequenceCut(self._sizes.sequence, self._sizes.sequence_parallel, place.position.count)
        return SequencePart(cut, place.part, group_of(place.context_ranks))

    def slices(self, place: TensorPlace | None, part: SequencePart | None) -> Slices:
        """Return the slices of activations in which dropout draws the masks of a place and part of the sequence."""
        slices = launch_slices(self._config, self._launched.index) if place is None else place.slices
        return slices if part is None else slices.of_part(part, self._launched if place is None else place.position)

    def experts_of(self, place: TensorPlace | None) -> tuple[int, ...]:
        """Return the experts that this rank has of each layer at ``place``; none where ranks share no experts."""
        crew = self._crew_of(place) if self._sizes.experts else None
        return () if crew is None else crew.experts_of(self._rank if place is None else place.rank)

    def join_crew(self, module: torch.nn.Module, built_for: TensorPlace | None, place: CellPlace | None) -> None:
        """Make the layers in ``module`` exchange tokens with the crew at ``place``, for which they were built.

        Their routers balance tokens over the cell. ``None``: the place of the launch.
        """
        group_of, crew = self._groups.crew, self._crew_of(built_for)
        if group_of is None:
            return
        if crew is not None:
            join_crew(module, crew, self._rank if built_for is None else built_for.rank, group_of)
        if self._config.num_moe_experts:
            ranks = _adjacent(self._rank, self._launch_ranks) if place is None else place.ranks
            route_over(module, {"tp_cp_group": group_of(ranks)})

    @property
    def fewer_tokens(self) -> float:
        """How many times fewer tokens a rank has than at launch, where Megatron weighs losses of routers by them."""
        if not self._config.calculate_per_token_loss:
            return 1.0
        return self._ranks / self._launch_ranks

    def _crew_of(self, place: TensorPlace | None) -> Crew | None:
        return self.launch_crew if place is None else place.crew

    def _part_at_launch(self) -> SequencePart | None:
        cut, count = self.cut, self._config.context_parallel_size
        if cut is None or cut.tensor is None:
            return None
        part = Position(self._rank // cut.tensor % count, count)
        if self._groups.context is None:
            return SequencePart(cut, part, parallel_state.get_context_parallel_group())
        # Not Megatron's group: a rank that joins a running job has another one, and so have ranks that had another cut.
        ranks = tuple(self._rank + (index - part.index) * cut.tensor for index in range(count))
        return SequencePart(cut, part, self._groups.context(ranks))

    def _cut_over(self, team: int | None) -> SequenceCut | None:
        """Return how cells cut the sequence; ``team``: :attr:`CellPlace.team`."""
        parallel = self._sizes.sequence_parallel
        return SequenceCut(self._sizes.sequence, parallel, team) if parallel or team is not None else None


def _adjacent(rank: int, size: int) -> tuple[int, ...]:
    """Return the ranks of the group of ``size`` with ``rank`` in it, as Megatron numbers ranks."""
    first = rank - rank % size
    return tuple(range(first, first + size))
