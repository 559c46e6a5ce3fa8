"""Scales of tensors in FP8 that follow the largest values of past steps (delayed scaling).

A layer multiplies a tensor by a scale before it rounds it to 8 bits. With delayed scaling that scale comes from the
largest absolute values of the tensor in past passes (Micikevicius et al., arXiv 2209.05433, §4; the recipe
``DelayedScaling`` of Transformer Engine). Transformer Engine takes these values of each micro-batch, so its scales
depend on which rank computed which micro-batch before. Here they are those of a whole step over all ranks, and scales
change once a step.

Invariant: the scales of a step are a function of its record alone. So they are equal on every rank, also on a newcomer,
and a step that is computed again has the same ones. A maximum depends on no order, so plans do not change them either.

Of the values in the window only those are kept that no later one exceeds: the others are never the maximum again. These
are a few a tensor, also with a window of 1024 steps.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

__all__ = ["DelayedScaling", "TensorScale"]

_LARGEST_SCALE = 2.0**127 * (2 - 2.0**-23)
"""The largest number of fp32."""


@dataclass(frozen=True)
class TensorScale:
    """The scale of one tensor, and the largest values that it may still follow from."""

    scale: float = 1.0
    past: tuple[tuple[int, float], ...] = ()
    """(updates since, largest absolute value), oldest first; values fall, since others never count again."""

    @classmethod
    def of(cls, scale: float, newest_first: Sequence[float], window: int) -> TensorScale:
        """Return it for a scale and the largest values of past steps, of which ``window - 1`` still count."""
        past, over = list[tuple[int, float]](), 0.0
        for age, value in enumerate(newest_first[: window - 1]):
            if value > over:
                past.append((age, value))
                over = value
        return cls(scale, tuple(reversed(past)))

    def updated(self, amax: float, window: int, margin: int, largest: float) -> TensorScale:
        """Return it after a step in which the largest absolute value was ``amax``.

        ``window``: steps that count, with this one; ``largest``: number of the type in 8 bits. Rounded once, as in
        Transformer Engine's kernel; its function for other recipes takes a reciprocal first.
        """
        amax = math.inf if math.isnan(amax) else amax
        over = max([amax, *(value for _, value in self.past)])
        above = [(age + 1, value) for age, value in self.past if value > amax]
        past = tuple(one for one in (*above, (0, amax)) if one[0] < window - 1 and one[1] > 0.0)
        if over == 0.0 or math.isinf(over):
            return TensorScale(self.scale, past)
        # A quotient of two fp32 numbers has the same bits if it is rounded to fp64 first.
        scale = array("f", [largest / 2**margin / over])[0]
        return TensorScale(_LARGEST_SCALE if math.isinf(scale) else scale, past)


@dataclass(frozen=True)
class DelayedScaling:
    """The tensors with such scales, and the recipe. A record has the scales as text: base64 of little-endian fields."""

    units: tuple[int, ...]
    """Compute units whose layers have such tensors, ascending."""
    largest: tuple[float, ...]
    """Largest number of the type in 8 bits of each tensor of a unit."""
    window: int = 1
    """Steps whose largest values count."""
    margin: int = 0
    """Powers of two that scales stay below the largest possible."""

    @property
    def size(self) -> int:
        """Number of tensors in the model."""
        return len(self.units) * len(self.largest)

    @property
    def start(self) -> str:
        """Of a new model: no step was taken, and scales are 1."""
        return self.text({})

    def text(self, tensors: Mapping[int, Sequence[TensorScale]]) -> str:
        """Return the text of unit → its tensors. Units that are missing have those of a new model.

        Raises ``ValueError`` if a unit has another number of tensors.
        """
        new = (TensorScale(),) * len(self.largest)
        flat = [tensor for unit in self.units for tensor in tensors.get(unit, new)]
        if len(flat) != self.size:
            raise ValueError(f"units {list(self.units)} have {len(self.largest)} tensors each: {len(flat)} are given")
        past = [one for tensor in flat for one in tensor.past]
        parts = (
            array("f", (tensor.scale for tensor in flat)),
            array("I", (len(tensor.past) for tensor in flat)),
            array("I", (age for age, _ in past)),
            array("f", (value for _, value in past)),
        )
        return base64.b64encode(b"".join(_little(part).tobytes() for part in parts)).decode()

    def tensors(self, text: str) -> dict[int, tuple[TensorScale, ...]]:
        """Inverse of :meth:`text`."""
        raw = memoryview(base64.b64decode(text))
        at, each = 4 * self.size, len(self.largest)
        scales, lengths = _numbers("f", raw[:at]), _numbers("I", raw[at : 2 * at])
        number = sum(lengths)
        ages, values = _numbers("I", raw[2 * at : 2 * at + 4 * number]), _numbers("f", raw[2 * at + 4 * number :])
        past = list(zip(ages, values, strict=True))
        ends = list(accumulate(lengths))
        flat = [
            TensorScale(scale, tuple(past[end - length : end]))
            for scale, length, end in zip(scales, lengths, ends, strict=True)
        ]
        return {unit: tuple(flat[at * each : (at + 1) * each]) for at, unit in enumerate(self.units)}

    def scales(self, text: str) -> dict[int, tuple[float, ...]]:
        """Return unit → scale of each of its tensors."""
        scales, each = _numbers("f", memoryview(base64.b64decode(text))[: 4 * self.size]), len(self.largest)
        return {unit: tuple(scales[at * each : (at + 1) * each]) for at, unit in enumerate(self.units)}

    def advanced(self, text: str, amaxes: Mapping[int, Sequence[float]]) -> str:
        """Return the text after a step. ``amaxes``: unit → largest absolute value of each of its tensors."""
        found = self.tensors(text)
        for unit, before in found.items():
            found[unit] = tuple(
                tensor.updated(amax, self.window, self.margin, largest)
                for tensor, amax, largest in zip(before, amaxes[unit], self.largest, strict=True)
            )
        return self.text(found)


def _little(numbers: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _numbers(kind: Literal["f", "I"], raw: memoryview) -> list[Any]:
    found: array[Any] = array(kind)
    found.frombytes(raw)
    return _little(found).tolist()
