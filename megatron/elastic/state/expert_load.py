"""The measured load of experts: the tokens of a step that each receives, as a mean over the last steps.

The mean decays: a step counts 1/:data:`SPAN` of it, and the first one all of it. A router's choices vary from step to
step, and what is decided by the load should follow what lasts.

Invariant: each mean is one rounding to fp32 of an fp64 expression of fp32 and integer values, so it has the same bits
on every kind of processor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.elastic.state.expert_layers import ExpertLayers

__all__ = ["SPAN", "ExpertLoad"]

SPAN = 16
"""Steps over which the mean is taken: a power of two, so that the division is exact."""


@dataclass(frozen=True)
class ExpertLoad(ExpertLayers):
    """The layers whose experts are measured."""

    def advanced(self, text: str, counts: Mapping[int, Sequence[int]]) -> str:
        """Return the load after a step of ``counts`` tokens by unit and expert; ``text`` is empty before the first."""
        if not text:
            return self.text(counts)
        return self.text(
            {
                unit: tuple(value + (count - value) / SPAN for value, count in zip(before, counts[unit], strict=True))
                for unit, before in self.by_unit(text).items()
            }
        )

    def tokens(self, text: str) -> dict[int, tuple[int, ...]]:
        """Return unit → tokens a step by expert, rounded; nothing before the first step."""
        found = self.by_unit(text) if text else {}
        return {unit: tuple(round(value) for value in values) for unit, values in found.items()}
