"""Numbers by layer and expert that a record carries: the bias of routers, and the measured load.

They are no parameters: they have no gradient, no owner and no mirror. They follow from the tokens that each expert
received, which ranks count and add up in the vote. So they are equal on every rank, also on a newcomer, which
receives them with the record.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ExpertLayers"]


@dataclass(frozen=True)
class ExpertLayers:
    """The layers with such numbers. A record has the numbers as text: base64 of little-endian fp32."""

    units: tuple[int, ...]
    """Compute units that are layers with experts, ascending, and the numbers of further layers behind the last unit."""
    experts: int
    """Number of experts of each."""

    @property
    def size(self) -> int:
        """Number of experts in the model."""
        return len(self.units) * self.experts

    def text(self, values: Mapping[int, Sequence[float]]) -> str:
        """Return the numbers of all layers as text. Raises ``ValueError`` unless every layer has one an expert."""
        if any(len(values.get(unit, ())) != self.experts for unit in self.units):
            raise ValueError(f"layers {list(self.units)} have {self.experts} experts each; numbers: {list(values)}")
        numbers = array("f", (value for unit in self.units for value in values[unit]))
        if sys.byteorder == "big":
            numbers.byteswap()
        return base64.b64encode(numbers.tobytes()).decode()

    def by_unit(self, text: str) -> dict[int, tuple[float, ...]]:
        """Return unit → number by expert."""
        values = array("f", base64.b64decode(text))
        if sys.byteorder == "big":
            values.byteswap()
        return {unit: tuple(values[at * self.experts : (at + 1) * self.experts]) for at, unit in enumerate(self.units)}
