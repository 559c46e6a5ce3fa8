"""The record of one committed step, and how the vote makes the next one.

``StepRecord(t+1) = advance(StepRecord(t), vote, hyper)`` is the commit point of
the step transaction (docs/design.md §3). It holds every scalar the update
needs, so that whoever replays the step, now or later, does exactly the same:
gradient multiplier, loss scale and its counters, rates, Adam's step and bias
corrections. It is immutable, on every rank, and part of the version.

Semantics are Megatron's (megatron.core.optimizer): norm of the unscaled
gradients over all parameters once; clip coefficient ``clip / (norm + 1e-6)`` if
below 1; a step with non-finite gradients is skipped only where there is a loss
scaler; ``DynamicGradScaler`` holds its scale in fp32; a skipped step advances
neither learning rate schedule nor Adam's step, but does consume its samples.

Sums over blocks and ranks use ``math.fsum`` (exactly rounded), so a vote taken
again in another order gives the same record.

Invariant: nothing in a record depends on a rank's own mathematical library, since two
versions of one, or two kinds of processor, may differ in the last bit of a power or a
cosine. Powers of the betas are products, which IEEE 754 defines to the bit; learning rates
and weight decay come from one rank, in the vote.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from megatron.elastic.state.layout import BlockKey

__all__ = [
    "ConstantSchedule",
    "GradientKey",
    "Hyper",
    "Rate",
    "Schedule",
    "StepRecord",
    "Vote",
    "advance",
    "multiplier_of",
    "next_power",
    "power_of",
]

_NOTHING = 2.0**-64
"""Less of a power changes nothing: 1 less 2 ** -54 is 1."""


class GradientKey(NamedTuple):
    """The computation that a reduced gradient comes from.

    That is the step it was computed in (version t), the generation, and how often the step was computed in that
    generation before.

    A rank that knows a vote was refused computes the step again; another may not know yet, and still hold the refused
    gradients. Without the attempt both would go by one name, and a vote taken again would mix them.
    """

    step: int
    generation: int
    attempt: int = 0


@dataclass(frozen=True)
class Rate:
    """Learning rate and weight decay of one parameter group."""

    lr: float
    weight_decay: float


class Schedule(Protocol):
    """Megatron's parameter scheduler as a pure function."""

    def rates(self, scheduler_steps: int) -> tuple[Rate, ...]:
        """Rates by parameter group when ``scheduler_steps`` (samples) have been scheduled."""


@dataclass(frozen=True)
class ConstantSchedule:
    """The same rates for ever."""

    constant: tuple[Rate, ...]

    def rates(self, scheduler_steps: int) -> tuple[Rate, ...]:
        """See :class:`Schedule`."""
        return self.constant


@dataclass(frozen=True)
class Hyper:
    """What does not change from step to step."""

    schedule: Schedule
    clip_grad: float = 1.0
    """0: neither clipped nor, in Megatron, measured; the norm is recorded all the same."""
    optimizer: Literal["adam", "sgd"] = "adam"
    decoupled_weight_decay: bool = True
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    sgd_momentum: float = 0.9
    scaler: Literal["none", "constant", "dynamic"] = "none"
    """none: bf16 and fp32 without --loss-scale; non-finite gradients are applied, as Megatron does."""
    initial_loss_scale: float = 1.0
    min_loss_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2


@dataclass(frozen=True, eq=False)
class StepRecord:
    """Everything global about the state at ``version``: the number of committed steps.

    Records are equal when their texts are: a norm that is not a number equals itself.

    Fields up to ``gradient`` describe the update that led from ``version - 1`` to
    ``version``; the rest is carried forward.
    """

    version: int
    skipped: bool = False
    grad_multiplier: float = 1.0
    """What the raw reduced gradient is multiplied by: 1/(denominator · loss scale) · clip coefficient."""
    clip_coefficient: float = 1.0
    grad_norm: float = 0.0
    """Of the unscaled gradients, before clipping."""
    rates: tuple[Rate, ...] = ()
    bias_correction1: float = 1.0
    """1 - ``beta_power1``."""
    bias_correction2: float = 1.0
    denominator: float = 1.0
    tokens: float = 0.0
    losses: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Per key of the loss dictionary: (numerator, denominator), summed over the global batch."""
    ledger_hash: str = ""
    plan_hash: str = ""
    gradient: GradientKey | None = None
    """The gradients this version was made from; None for an initial or loaded state."""
    placement: str = ""
    """Digest of the placement under which the vote was taken. It settles which of two holds when a
    generation ends between a change of placement and its first vote (``transfer``)."""

    agreed: tuple[str, ...] = ()
    """What every rank knew when it voted and all act on at the boundary after this step ('drain', 'join', …). It
    belongs to the record because a rank that missed the vote and rolled forward must do the same as the others."""

    loss_scale: float = 1.0
    """For the next step."""
    growth_tracker: int = 0
    hysteresis_tracker: int = 2
    adam_step: int = 0
    beta_power1: float = 1.0
    """``beta1 ** adam_step`` as :func:`next_power` makes it, a factor a step."""
    beta_power2: float = 1.0
    scheduler_steps: int = 0
    """Megatron's OptimizerParamScheduler.num_steps: samples of steps that were not skipped."""
    consumed_samples: int = 0
    skipped_steps: int = 0
    speeds: tuple[tuple[int, int], ...] = ()
    """(cell, parts per million) of the cells measured to be slower than their peers: what plans are made from."""

    @classmethod
    def initial(cls, hyper: Hyper, version: int = 0) -> StepRecord:
        """Record of a state that no step has led to."""
        return cls(version, loss_scale=_fp32(hyper.initial_loss_scale), hysteresis_tracker=hyper.hysteresis)

    def at_adam_step(self, step: int, hyper: Hyper) -> StepRecord:
        """The same with Adam ``step`` steps on, as after the load of a checkpoint.

        The powers are those of a run that took all these steps, to the bit.
        """
        power1, power2 = power_of(hyper.beta1, step), power_of(hyper.beta2, step)
        return replace(self, adam_step=step, beta_power1=power1, beta_power2=power2)

    def to_json(self) -> str:
        """Text; floats keep all their bits (Python writes the shortest that reads back equal)."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepRecord) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """Hash of everything in the record, to compare between processes and to chain (32 hex digits)."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    @classmethod
    def from_json(cls, text: str) -> StepRecord:
        """Inverse of :meth:`to_json`."""
        raw = json.loads(text)
        raw["rates"] = tuple(Rate(**rate) for rate in raw["rates"])
        raw["losses"] = {key: (num, den) for key, (num, den) in raw["losses"].items()}
        raw["agreed"] = tuple(raw["agreed"])
        raw["speeds"] = tuple((cell, speed) for cell, speed in raw["speeds"])
        raw["gradient"] = GradientKey(*raw["gradient"]) if raw["gradient"] is not None else None
        return cls(**raw)


@dataclass(frozen=True)
class Vote:
    """The sums every rank has after the vote's all-reduce."""

    gradient: GradientKey
    norm_sq: Mapping[BlockKey, float] | Sequence[float]
    """Per block that counts in the norm: sum of squares of the raw reduced gradient."""
    found_nonfinite: bool
    denominator: float
    """What summed gradients are divided by: all tokens with --calculate-per-token-loss, else 1."""
    tokens: float
    samples: int
    """Samples of the global batch (consumed also by a skipped step)."""
    losses: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    ledger_hash: str = ""
    plan_hash: str = ""
    placement: str = ""
    agreed: tuple[str, ...] = ()
    speeds: tuple[tuple[int, int], ...] = ()
    """Published speeds after this step's measurements."""
    rates: tuple[Rate, ...] = ()
    """By parameter group, of the one rank that looked them up."""


def _fp32(value: float) -> float:
    """``value`` rounded to fp32, infinity where it does not fit."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def next_power(power: float, beta: float) -> float:
    """``power * beta``; 0 once 1 less the power is 1, before products become subnormal, which some processors flush."""
    product = power * beta
    return product if product >= _NOTHING else 0.0


def power_of(beta: float, steps: int) -> float:
    """``beta ** steps`` by ``steps`` products."""
    power = 1.0
    for _ in range(steps):
        if power == 0.0 or beta == 1.0:
            break
        power = next_power(power, beta)
    return power


def multiplier_of(loss_scale: float, denominator: float) -> float:
    """1/(loss scale · denominator) as Megatron forms it: the reciprocal of the scale rounded to fp32 first.

    No tokens at all (every label masked) divide by 1.
    """
    return _fp32(1.0 / loss_scale) / (denominator if denominator > 0 else 1.0)


def advance(previous: StepRecord, vote: Vote, hyper: Hyper) -> StepRecord:
    """The record of the next version. Pure; every rank computes the same from the same vote."""
    if vote.gradient.step != previous.version:
        raise ValueError(f"vote on gradients of step {vote.gradient.step} at version {previous.version}")
    if not vote.rates:
        raise ValueError(f"vote at version {previous.version} without learning rates")
    squares = vote.norm_sq.values() if isinstance(vote.norm_sq, Mapping) else vote.norm_sq
    unscale = multiplier_of(previous.loss_scale, vote.denominator)
    norm = _norm(list(squares)) * unscale
    coefficient = _clip_coefficient(norm, hyper.clip_grad)
    skipped = vote.found_nonfinite and hyper.scaler != "none"
    power1, power2 = previous.beta_power1, previous.beta_power2
    if not skipped:
        power1, power2 = next_power(power1, hyper.beta1), next_power(power2, hyper.beta2)
    scale, growth, hysteresis = _next_scale(previous, vote.found_nonfinite, hyper)
    return StepRecord(
        version=previous.version + 1,
        skipped=skipped,
        grad_multiplier=unscale * coefficient,
        clip_coefficient=coefficient,
        grad_norm=norm,
        rates=vote.rates,
        bias_correction1=1.0 - power1,
        bias_correction2=1.0 - power2,
        denominator=vote.denominator,
        tokens=vote.tokens,
        losses=dict(vote.losses),
        ledger_hash=vote.ledger_hash,
        plan_hash=vote.plan_hash,
        gradient=vote.gradient,
        placement=vote.placement or previous.placement,
        agreed=vote.agreed,
        loss_scale=scale,
        growth_tracker=growth,
        hysteresis_tracker=hysteresis,
        adam_step=previous.adam_step + (not skipped),
        beta_power1=power1,
        beta_power2=power2,
        scheduler_steps=previous.scheduler_steps + (0 if skipped else vote.samples),
        consumed_samples=previous.consumed_samples + vote.samples,
        skipped_steps=previous.skipped_steps + skipped,
        speeds=vote.speeds,
    )


def _norm(squares: list[float]) -> float:
    if not all(math.isfinite(x) for x in squares):
        return math.nan if any(math.isnan(x) for x in squares) else math.inf
    return math.sqrt(math.fsum(squares))


def _clip_coefficient(norm: float, clip_grad: float) -> float:
    if clip_grad <= 0.0:
        return 1.0
    coefficient = clip_grad / (norm + 1.0e-6)
    return coefficient if coefficient < 1.0 else 1.0  # a NaN norm does not clip, as in Megatron


def _next_scale(previous: StepRecord, found: bool, hyper: Hyper) -> tuple[float, int, int]:
    """(scale, growth tracker, hysteresis tracker) after DynamicGradScaler.update."""
    scale, growth, hysteresis = previous.loss_scale, previous.growth_tracker, previous.hysteresis_tracker
    if hyper.scaler != "dynamic":
        return scale, growth, hysteresis
    if found:
        hysteresis -= 1
        if hysteresis <= 0:
            scale = max(_fp32(scale * _fp32(hyper.backoff_factor)), _fp32(hyper.min_loss_scale))
        return scale, 0, hysteresis
    growth += 1
    if growth == hyper.growth_interval:
        return _fp32(scale * _fp32(hyper.growth_factor)), 0, hyper.hysteresis
    return scale, growth, hysteresis
