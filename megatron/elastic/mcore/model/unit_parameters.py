"""The parameters of units with their names, layouts at the launch, and overlaps at a rank's place.

Invariant: a parameter has the same specification on every rank and at every place: its name within the unit, with an
expert's number in the layer, and its shape as cut at the launch.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron.elastic.engine.compute.model_interface import UnitParameter
from megatron.elastic.mcore.model.expert_homes import expert_of
from megatron.elastic.mcore.model.param_groups import GroupKeys
from megatron.elastic.mcore.model.tensor_cut import (
    Sizes,
    expert_overlaps,
    expert_shape,
    is_cut,
    launch_shape,
    local_shape,
    overlaps_of,
)
from megatron.elastic.mcore.model.tensor_place import TensorPlace
from megatron.elastic.mcore.model.units import Anatomy
from megatron.elastic.state.coverage import Overlap
from megatron.elastic.state.layout import ParamSpec

__all__ = ["TIED_NAME", "UnitParameters"]

TIED_NAME = "word_embeddings.weight"
"""Name of the weight of the state-only unit of tied embeddings."""


class UnitParameters:
    """The parameters of the units of ``anatomy``."""

    def __init__(self, anatomy: Anatomy, sizes: Sizes, groups: GroupKeys) -> None:
        self._anatomy, self._sizes, self._groups = anatomy, sizes, groups
        self._specs: dict[tuple[int, tuple[int, ...]], tuple[ParamSpec, ...]] = {}
        """(unit, experts of this rank) → specifications, fixed when the unit is first held with these."""

    @property
    def tied_unit(self) -> int | None:
        """The state-only unit of tied embeddings, if the model ties them."""
        return self._anatomy.units if self._anatomy.tied else None

    def held(self, place: TensorPlace | None, experts: tuple[int, ...]) -> dict[int, tuple[UnitParameter, ...]]:
        """Return the parameters of the held units at ``place``, where this rank has ``experts``.

        Raises ``ValueError`` if one does not have the shape of that place.
        """
        units: dict[int, list[tuple[str, torch.nn.Parameter]]] = {
            unit: list(self._anatomy.named_parameters(unit)) for unit in self._anatomy.held()
        }
        shared = self._anatomy.tied_parameter() if self.tied_unit is not None else None
        if shared is not None and self.tied_unit is not None:
            units[self.tied_unit] = [("embedding.word_embeddings.weight", shared)]
        found: dict[int, tuple[UnitParameter, ...]] = {}
        for unit, named in units.items():
            key = unit, experts
            if key not in self._specs:
                self._specs[key] = tuple(self._spec(unit, name, parameter, place, experts) for name, parameter in named)
            found[unit] = tuple(
                UnitParameter(spec, parameter, self._checked_overlaps(spec, parameter, place))
                for spec, (_, parameter) in zip(self._specs[key], named, strict=True)
            )
        return found

    def overlaps(self, spec: ParamSpec, place: TensorPlace | None) -> tuple[Overlap, ...] | None:
        """Return the overlaps of a parameter at a place (:class:`ModelInterface`)."""
        if place is None:
            return None
        if spec.expert is not None:
            assert place.crew is not None, "ranks that share experts have a crew"
            part = place.crew.part_of(place.rank)
            return expert_overlaps(self._sizes, spec.expert, part, spec.name, spec.shape)
        return overlaps_of(self._sizes, place.position, spec.name, spec.sharded, spec.shape)

    def _checked_overlaps(
        self, spec: ParamSpec, parameter: torch.nn.Parameter, place: TensorPlace | None
    ) -> tuple[Overlap, ...] | None:
        if place is not None and spec.expert is None:
            expected = local_shape(self._sizes, place.position, spec.name, spec.shape)
            if parameter.numel() and parameter.shape != expected:
                found = tuple(parameter.shape)
                raise ValueError(f"{spec.name} has shape {found}; {place.position} has {expected} of it")
        return self.overlaps(spec, place)

    def _spec(
        self, unit: int, name: str, parameter: Any, place: TensorPlace | None, experts: tuple[int, ...]
    ) -> ParamSpec:
        key = self._groups.key(name, parameter)
        shape = tuple(parameter.shape)
        local = self._local_name(unit, name)
        local, expert = expert_of(local, experts) if experts else (local, None)
        if expert is not None:
            shape = expert_shape(self._sizes, name, shape)
        elif place is not None and not place.even:
            shape = launch_shape(self._sizes, name, shape)
        return ParamSpec(
            name=local,
            numel=math.prod(shape),
            shape=shape,
            sharded=is_cut(name) or bool(getattr(parameter, "tensor_model_parallel", False)),
            weight_decay_multiplier=key.wd_mult,
            group=key.index,
            expert=expert,
            matrix=self._groups.matrix(name, parameter, shape),
        )

    def _local_name(self, unit: int, name: str) -> str:
        """Return a parameter's name within its unit, equal on every holder."""
        if unit == self.tied_unit:
            return TIED_NAME
        return name.removeprefix(f"decoder.layers.{unit - 1}.") if 0 < unit < self._anatomy.units - 1 else name
