"""A stage of the launch in checkpoints: the model that Megatron built for it, and its parameters by unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.elastic.engine.compute.model_interface import UnitParameter
from megatron.elastic.mcore.model.gpt import GptInterface

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
    shared_experts: bool = False
    """True if it is the part of a stage that has the experts which ranks share."""

    def ordered(self) -> list[UnitParameter]:
        """Return the trainable parameters in the order of Megatron's groups."""
        items = [item for parameters in self.launched.values() for item in parameters]
        rank = {id(p): i for i, p in enumerate(self.interface.chunks.parameters())}
        return sorted(items, key=lambda item: (item.spec.group, rank[id(item.parameter)]))
