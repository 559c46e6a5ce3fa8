"""The engine's settings, which the host makes from its arguments, and the result of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.elastic.config import ElasticConfig
from megatron.elastic.state.record import Hyper

__all__ = ["OverlapSettings", "Settings", "StepResult"]


@dataclass(frozen=True)
class OverlapSettings:
    """Communication that goes on behind computation (docs/design.md §3.8)."""

    reduce: bool = False
    """Reduce and ship gradients behind the backward."""
    gather: bool = False
    """Gather parameters behind the next forward."""
    bucket: int = 1
    """Elements that are reduced, sent or gathered together, at least where there are as many."""

    @classmethod
    def of(cls, config: ElasticConfig) -> OverlapSettings:
        """Return what the configuration asks for."""
        return cls(config.overlap in ("reduce", "both"), config.overlap in ("gather", "both"), config.bucket_elements)


@dataclass(frozen=True)
class Settings:
    """Numerics of the run, constant over its generations."""

    seed: int
    hyper: Hyper
    per_token_loss: bool = False
    whole_microbatches: bool = False
    """True if a loss depends on all rows of a micro-batch together, so that ranks never share one."""
    layer_losses: bool = False
    """True if layers add losses of their own: each rank that computes layers then reports a part of their values."""
    count_zeros: bool = False
    check_finite: bool = True
    """True if a gradient that is not finite ends the job (Megatron's default)."""
    communication_timeout: float = 600.0
    """Seconds that a wait inside a healthy generation may last."""
    batch_size: Callable[[int], int] | None = None
    """Samples of the step that follows so many consumed ones, the same on every rank; None: those of the launch's
    grid."""
    steps: int | None = None
    """Steps of the whole run, if known: units do not move if that would not pay off before its end."""


@dataclass(frozen=True)
class StepResult:
    """One committed step in the form that the host's loop expects."""

    losses: dict[str, float]
    """Reported quantities over the whole global batch."""
    skipped: bool
    grad_norm: float
    zeros: int | None
    loss_scale: float
