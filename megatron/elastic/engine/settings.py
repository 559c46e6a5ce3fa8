"""What the engine is told once, in its own words (the host translates its arguments)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.elastic.state.record import Hyper

__all__ = ["Settings", "StepResult"]


@dataclass(frozen=True)
class Settings:
    """Numerics of the run: part of the job, never of a generation."""

    seed: int
    hyper: Hyper
    per_token_loss: bool = False
    count_zeros: bool = False
    check_finite: bool = True
    """A gradient that is not finite ends the job (Megatron's default) instead of being applied."""
    communication_timeout: float = 600.0
    """Seconds a wait inside a healthy generation may last."""
    steps: int | None = None
    """Steps of the whole run, where that is known: nothing moves that would not pay back before its end."""


@dataclass(frozen=True)
class StepResult:
    """One committed step as the host's loop wants it."""

    losses: dict[str, float]
    """Reported quantities over the whole global batch."""
    skipped: bool
    grad_norm: float
    zeros: int | None
    loss_scale: float
