"""Lion's coefficients (the step itself: :mod:`adam`)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Lion"]


@dataclass(frozen=True)
class Lion:
    """Coefficients of Lion (Chen et al., arXiv 2302.06675, algorithm 2), constant over the run."""

    beta1: float
    """Weight of the momentum in the update, whose sign alone counts."""
    beta2: float
    """Weight of the momentum in the next one."""
