"""The bias by which routers balance experts without an auxiliary loss.

Each layer with experts has one number an expert, which its router adds to scores when it chooses experts. After a step
the bias of an expert that received fewer tokens than the mean rises by a fixed rate, that of one with more falls
(Wang et al., arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, §2.1.2).

Invariant: the bias is fp32 after every step, with the bits that Megatron computes from the same counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.elastic.state.expert_layers import ExpertLayers

__all__ = ["ExpertBalance"]


@dataclass(frozen=True)
class ExpertBalance(ExpertLayers):
    """The layers with such a bias, and its rate."""

    rate: float

    @property
    def start(self) -> str:
        """The bias of a new model: zeros."""
        return self.text(dict.fromkeys(self.units, (0.0,) * self.experts))

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
