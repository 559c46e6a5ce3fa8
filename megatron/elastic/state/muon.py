"""Muon's hyper-parameters, and the coefficients of its iterations (the step itself: :mod:`muon_step`).

Coefficients and factors follow Megatron-core 0.17's Muon over emerging-optimizers 0.3.0 (``muon_utils.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice, repeat
from typing import Literal, get_args

__all__ = ["COEFFICIENTS", "Muon", "Precision", "Scale"]

Scale = Literal["spectral", "unit_rms_norm", "shape_scaling"]
Precision = Literal["medium", "high"]

_JORDAN = (3.4445, -4.7750, 2.0315)

COEFFICIENTS = {
    "simple": (_JORDAN,),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
    "deepseekv4": (*((_JORDAN,) * 8), *(((2.0, -1.5, 0.5),) * 2)),
}
"""Name (``--muon-coefficient-type``) → (a, b, c) of each iteration X ← aX + (bA + cA²)X with A = XXᵀ.

Origins: Jordan (simple), Cesista's optimum for each iteration (quintic), arXiv 2505.16932 (polar_express), arXiv
2506.10935 (cans), flash-newton-schulz (aol), DeepSeek-V4's report (deepseekv4).
"""
_LAST_REPEATS = ("polar_express", "cans", "deepseekv4")
"""Sets whose last entry goes on when there are more iterations than entries; the others begin anew."""


@dataclass(frozen=True)
class Muon:
    """Muon's hyper-parameters, constant over the run: Megatron's ``--muon-*``. Raises ``ValueError`` for others."""

    momentum: float = 0.9
    nesterov: bool = False
    scale: Scale = "spectral"
    """The update's factor, of a matrix of m rows and n columns: the root of max(m, n), m/n, or max(1, m/n)."""
    coefficients: str = "quintic"
    iterations: int = 5
    extra_scale: float = 1.0
    precision: Precision = "medium"
    """medium: products of bf16; high: torch's fp32 products of that precision."""

    def __post_init__(self) -> None:
        if self.coefficients not in COEFFICIENTS:
            known = ", ".join(COEFFICIENTS)
            raise ValueError(f"--muon-coefficient-type {self.coefficients} is unknown: use one of {known}")
        if self.iterations < 1:
            raise ValueError(f"--muon-num-ns-steps {self.iterations} is below 1: use 5")
        for flag, value, choices in (
            ("--muon-scale-mode", self.scale, get_args(Scale)),
            ("--muon-fp32-matmul-prec", self.precision, get_args(Precision)),
        ):
            if value not in choices:
                raise ValueError(f"{flag} {value} is not supported: use one of {', '.join(choices)}")

    def factor(self, rows: int, columns: int) -> float:
        """Return the factor of an orthogonalised update of this shape."""
        squares = {"spectral": max(rows, columns), "unit_rms_norm": rows / columns}
        return float(squares.get(self.scale, max(1.0, rows / columns)) ** 0.5) * self.extra_scale

    def rounds(self) -> Iterator[tuple[float, float, float]]:
        """Return the coefficients of each iteration."""
        known = COEFFICIENTS[self.coefficients]
        endless = chain(known, repeat(known[-1])) if self.coefficients in _LAST_REPEATS else cycle(known)
        return islice(endless, self.iterations)
