"""The bias by which routers balance experts without an auxiliary loss.

Each layer with experts has one number an expert, which its router adds to scores when it chooses experts. After a step
the bias of an expert that received fewer tokens than the mean rises by a fixed rate, that of one with more falls
(Wang et al., arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, §2.1.2).

It is no parameter: it has no gradient, no owner and no mirror. Tokens are counted through the vote, and the record of a
step has the bias for the next one. So every rank has the same bias, a newcomer too.

Invariant: the bias is fp32 after every step, with the bits that Megatron computes from the same counts.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ExpertBalance"]


@dataclass(frozen=True)
class ExpertBalance:
    """The layers with such a bias, and its rate. A record has the bias as text: base64 of little-endian fp32."""

    units: tuple[int, ...]
    """Compute units that are layers with experts, ascending."""
    experts: int
    rate: float

    @property
    def size(self) -> int:
        """Number of biases in the model."""
        return len(self.units) * self.experts

    @property
    def start(self) -> str:
        """The bias of a new model: zeros."""
        return _text(array("f", bytes(4 * self.size)))

    def text(self, bias: Mapping[int, Sequence[float]]) -> str:
        """Return the bias of all layers as text. Raises ``ValueError`` unless every layer has one an expert."""
        if any(len(bias.get(unit, ())) != self.experts for unit in self.units):
            raise ValueError(f"layers {list(self.units)} have {self.experts} experts each; the bias has {list(bias)}")
        return _text(array("f", (value for unit in self.units for value in bias[unit])))

    def by_unit(self, text: str) -> dict[int, tuple[float, ...]]:
        """Return unit → bias by expert."""
        values = _values(text)
        return {unit: tuple(values[at * self.experts : (at + 1) * self.experts]) for at, unit in enumerate(self.units)}

    def advanced(self, text: str, counts: Mapping[int, Sequence[int]]) -> str:
        """Return the bias after a step in which the experts of each unit received ``counts`` tokens."""
        rate, bias = array("f", [self.rate])[0], self.by_unit(text)
        for unit, before in bias.items():
            total = sum(counts[unit])
            bias[unit] = tuple(
                value + _sign(total - count * self.experts) * rate
                for value, count in zip(before, counts[unit], strict=True)
            )  # fp64 here; the array of fp32 rounds the sum once, as an addition in fp32 does
        return self.text(bias)


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


def _text(values: array[float]) -> str:
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


def _values(text: str) -> array[float]:
    values = array("f", base64.b64decode(text))
    if sys.byteorder == "big":
        values.byteswap()
    return values
