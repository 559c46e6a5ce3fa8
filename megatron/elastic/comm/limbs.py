"""Natural numbers cut into three fp64 values, so that a sum of fp64 vectors adds them exactly.

The sum must be below 2^95: fp64 has 53 bits, and the last limb begins at bit 42. ``csrc/comm/limbs.hpp`` cuts them
alike.
"""

from __future__ import annotations

__all__ = ["limbs_of", "of_limbs"]

_BITS = 21
_MASK = (1 << _BITS) - 1


def limbs_of(number: int) -> tuple[int, int, int]:
    """Return the limbs, lowest first; the last one holds the rest."""
    return number & _MASK, number >> _BITS & _MASK, number >> 2 * _BITS


def of_limbs(low: float, middle: float, high: float) -> int:
    """Return the sum whose limbs add up to these."""
    return int(low) + (int(middle) << _BITS) + (int(high) << 2 * _BITS)
