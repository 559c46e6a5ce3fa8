"""A stage of the launch in checkpoints: the model that Megatron built for it, and its parameters by unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.elastic.engine.compute.model_interface import UnitParameter
from megatron.elastic.mcore.model.gpt import GptInterface
from megatron.elastic.state.layout import ParamSpec

__all__ = ["LaunchStage", "Launched"]

Launched = Mapping[int, Sequence[UnitParameter]]
"""Unit → parameters of a rank's place at launch. The rank writes these, independent of the units it computes."""


@dataclass(frozen=True)
class LaunchStage:
    """One stage of the launch on one rank."""

    rank: int
    """The rank of the launch that has this place: this process, or a lost one in whose place it writes."""
    interface: GptInterface
    launched: Launched
    experts: tuple[bool, ...] = (False,)
    """Which parameters it has: those of experts that ranks share (True), all others (False)."""
    matrices: bool = False
    """True if it is the part of a stage that has an optimizer of matrices (``OF_MATRICES``)."""

    def part(self, experts: tuple[bool, ...], matrices: bool) -> LaunchStage:
        """Return the part of the stage for which Megatron has an optimizer of its own."""
        launched = {
            unit: tuple(i for i in items if _is_of(i.spec, experts, matrices)) for unit, items in self.launched.items()
        }
        return LaunchStage(self.rank, self.interface, launched, experts, matrices)

    def has(self, spec: ParamSpec) -> bool:
        """Return whether a parameter of this kind belongs to the part."""
        return _is_of(spec, self.experts, self.matrices)

    def ordered(self) -> list[UnitParameter]:
        """Return the trainable parameters in the order of Megatron's groups, those of shared experts last."""
        items = [item for parameters in self.launched.values() for item in parameters]
        rank = {id(p): i for i, p in enumerate(self.interface.chunks.parameters())}
        return sorted(items, key=lambda item: (_shared(item.spec), item.spec.group, rank[id(item.parameter)]))


def _shared(spec: ParamSpec) -> bool:
    """Return whether the parameter is one of an expert that ranks share."""
    return spec.expert is not None


def _is_of(spec: ParamSpec, experts: tuple[bool, ...], matrices: bool) -> bool:
    return _shared(spec) in experts and (spec.matrix is not None) == matrices
