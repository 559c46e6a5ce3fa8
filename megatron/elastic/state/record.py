"""The record of one committed step, and its computation from the vote.

``StepRecord(t+1) = advance(StepRecord(t), vote, hyper)`` is the commit point of
the step transaction (docs/design.md §3). It holds every scalar that the update
needs, so every replay of the step gives the same result:
gradient multiplier, loss scale and its counters, rates, Adam's step and bias
corrections. It is immutable and equal on every rank.

Semantics are Megatron's (megatron.core.optimizer):

- the norm is that of the unscaled gradients, with every parameter once;
- gradients are multiplied by ``clip / (norm + 1e-6)`` if that is below 1;
- a step with non-finite gradients is skipped only with a loss scaler;
- ``DynamicGradScaler`` holds its scale in fp32;
- a skipped step advances neither learning rate schedule nor Adam's step, but does consume its samples;
- a step that is left out is a skipped one of which loss scaler, expert bias and FP8 scales do not learn.

Sums over blocks and ranks use ``math.fsum`` (exactly rounded), so a repeated vote
with another order of additions gives the same record.

Invariant: no value of a record depends on a rank's own mathematical library, since two
versions or two kinds of processor may differ in the last bit of a power or a
cosine. Powers of the betas are products, which IEEE 754 defines to the bit; learning rates
and weight decay come from one rank, in the vote.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import xxhash

from megatron.elastic.state.delayed_scaling import DelayedScaling
from megatron.elastic.state.expert_bias import ExpertBalance
from megatron.elastic.state.expert_layers import ExpertLayers
from megatron.elastic.state.expert_load import ExpertLoad
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.lion import Lion
from megatron.elastic.state.muon import Muon

__all__ = [
    "Agreed",
    "ConstantSchedule",
    "GradientKey",
    "Hyper",
    "MomentType",
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
"""Powers below this count as 0, which does not change the bias correction: 1 - 2 ** -54 is 1 in fp64."""


class GradientKey(NamedTuple):
    """The name of one computation of a gradient: step (version t), generation, and number of earlier attempts.

    A rank that knows a vote was refused computes the step again, while another may not know yet and still hold the
    refused gradients. Without the attempt both would have one name, and a repeated vote would mix them.
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
        """Return the rates by parameter group after ``scheduler_steps`` (samples)."""


@dataclass(frozen=True)
class ConstantSchedule:
    """Constant rates."""

    constant: tuple[Rate, ...]

    def rates(self, scheduler_steps: int) -> tuple[Rate, ...]:
        """Return the constant rates (:class:`Schedule`)."""
        return self.constant


MomentType = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters that are constant over the run."""

    schedule: Schedule
    clip_grad: float = 1.0
    """0: no clipping. The norm is recorded nevertheless (Megatron does not compute it then)."""
    optimizer: Literal["adam", "sgd"] = "adam"
    decoupled_weight_decay: bool = True
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    eps_by_group: tuple[float, ...] = ()
    """Adam's epsilon by parameter group; empty: all groups have ``eps``."""
    sgd_momentum: float = 0.9
    matrices: Muon | Lion | None = None
    """The optimizer of matrices; ``optimizer`` steps the other parameters. None: it steps all parameters."""
    moments: tuple[MomentType, MomentType] = ("fp32", "fp32")
    """Types of the values of Adam's exp_avg and exp_avg_sq, which are kept in fp32 tensors."""
    scaler: Literal["none", "constant", "dynamic"] = "none"
    """none: bf16 and fp32 without --loss-scale; non-finite gradients are applied, as in Megatron."""
    initial_loss_scale: float = 1.0
    min_loss_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    balance: ExpertBalance | None = None
    """Layers whose routers have a bias that follows the numbers of tokens; None: there are none."""
    load: ExpertLoad | None = None
    """Layers whose experts ranks share, so that their load is measured; None: there are none."""
    scaling: DelayedScaling | None = None
    """Tensors in FP8 whose scales follow past steps; None: there are none."""

    @property
    def counted(self) -> ExpertLayers | None:
        """The layers whose tokens the vote counts by expert."""
        return self.balance or self.load


@dataclass(frozen=True)
class Agreed:
    """The requests that a vote agreed on, for all ranks to carry out at the boundary after its step."""

    join: bool = False
    """Admit the newcomers."""
    drain: bool = False
    """Save and end the job."""
    save: bool = False
    """Save a checkpoint."""
    written: bool = False
    """Finish the checkpoint under way: every rank has written its share."""
    leave: tuple[int, ...] = ()
    """Ranks to release, ascending."""
    reshape: tuple[int, ...] = ()
    """Number of the request, tensor-, pipeline- and data-parallel size to go on with; empty: the present ones."""


@dataclass(frozen=True, eq=False, slots=True)
class StepRecord:
    """All global values of the state at ``version``, the number of committed steps.

    Records are equal if their digests are, so a NaN norm equals itself.

    Fields up to ``gradient`` describe the update that led from ``version - 1`` to
    ``version``; the rest is carried forward.
    """

    version: int
    skipped: bool = False
    grad_multiplier: float = 1.0
    """Factor on the raw reduced gradient: 1/(denominator · loss scale) · clip coefficient."""
    clip_coefficient: float = 1.0
    grad_norm: float = 0.0
    """Norm of the unscaled gradients, before clipping."""
    rates: tuple[Rate, ...] = ()
    bias_correction1: float = 1.0
    """1 - ``beta_power1``."""
    bias_correction2: float = 1.0
    denominator: float = 1.0
    tokens: float = 0.0
    zeros: int = 0
    """Elements of the gradient that are zero; 0 where they are not counted."""
    losses: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Per key of the loss dictionary: (numerator, denominator), summed over the global batch."""
    ledger_hash: str = ""
    plan_hash: str = ""
    gradient: GradientKey | None = None
    """Key of the gradients of this version's update; None for an initial or loaded state."""
    placement: str = ""
    """Digest of the configuration that the vote named. It decides which of two is in force when a generation ends
    between a change of configuration and its first vote (``transfer``)."""
    undone: int = 0
    """Number of times that a later record was undone and its :attr:`placement` taken over (``state`` mode). Of two
    records of one version the one with the larger number holds: some ranks may have yet to take it over."""

    agreed: Agreed = Agreed()
    """In the record because a rank that missed the vote and rolled forward must act like the others."""

    loss_scale: float = 1.0
    """Loss scale of the next step."""
    growth_tracker: int = 0
    hysteresis_tracker: int = 2
    adam_step: int = 0
    beta_power1: float = 1.0
    """``beta1 ** adam_step``, computed by :func:`next_power` with one factor a step."""
    beta_power2: float = 1.0
    scheduler_steps: int = 0
    """Megatron's OptimizerParamScheduler.num_steps: samples of steps that were not skipped."""
    consumed_samples: int = 0
    skipped_steps: int = 0
    speeds: tuple[tuple[int, int], ...] = ()
    """(cell, parts per million) of the cells measured to be slower than their peers; plans use them."""
    expert_bias: str = ""
    """Bias of routers in the next step (:class:`ExpertBalance`); empty where no layer has one."""
    expert_load: str = ""
    """Measured load of experts (:class:`ExpertLoad`); empty before the first step, and where it is not measured."""
    fp8_scales: str = ""
    """Scales of tensors in the next step (:class:`DelayedScaling`); empty where none follows past steps."""

    _digest: str = field(default="", init=False, repr=False)

    @classmethod
    def initial(cls, hyper: Hyper, version: int = 0) -> StepRecord:
        """Return the record of an initial state."""
        return cls(
            version,
            loss_scale=_fp32(hyper.initial_loss_scale),
            hysteresis_tracker=hyper.hysteresis,
            expert_bias="" if hyper.balance is None else hyper.balance.start,
            fp8_scales="" if hyper.scaling is None else hyper.scaling.start,
        )

    def in_place_of(self, placement: str) -> StepRecord:
        """Return the record to go on from after a later one, which names ``placement``, was undone."""
        if placement == self.placement:
            return self
        return replace(self, placement=placement, undone=self.undone + 1)

    def at_adam_step(self, step: int, hyper: Hyper) -> StepRecord:
        """Return the record with Adam's counter at ``step``, for the load of a checkpoint.

        The powers have the same bits as in a run that took all these steps.
        """
        power1, power2 = power_of(hyper.beta1, step), power_of(hyper.beta2, step)
        return replace(self, adam_step=step, beta_power1=power1, beta_power2=power2)

    def to_json(self) -> str:
        """Return JSON; floats keep all their bits (Python writes the shortest text that reads back equal)."""
        return _ENCODER.encode(_shallow(self))

    def __eq__(self, other: object) -> bool:
        return other is self or (isinstance(other, StepRecord) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def age(self) -> tuple[int, int]:
        """Its place among the records of a job: the largest one is the newest."""
        return self.version, self.undone

    @property
    def digest(self) -> str:
        """Hash of the whole record, to compare between processes and for lineages (32 hex digits)."""
        if not self._digest:
            object.__setattr__(self, "_digest", self._hashed())
        return self._digest

    def _hashed(self) -> str:
        # In pieces: for a block of memory beyond 1 KiB, glibc's allocator first merges all small ones that the step has
        # freed, which takes longer than all of this.
        whole, values = xxhash.xxh3_128(), list(_values_of(self))
        for start in range(0, len(values), _PIECE):
            whole.update(_PACKER.encode(values[start : start + _PIECE]))
        return whole.hexdigest()

    @classmethod
    def from_json(cls, text: str) -> StepRecord:
        """Inverse of :meth:`to_json`."""
        raw = json.loads(text)
        raw["rates"] = tuple(Rate(**rate) for rate in raw["rates"])
        raw["losses"] = {key: (num, den) for key, (num, den) in raw["losses"].items()}
        agreed = raw["agreed"]
        raw["agreed"] = Agreed(**{**agreed, "leave": tuple(agreed["leave"]), "reshape": tuple(agreed["reshape"])})
        raw["speeds"] = tuple((cell, speed) for cell, speed in raw["speeds"])
        raw["gradient"] = GradientKey(*raw["gradient"]) if raw["gradient"] is not None else None
        return cls(**raw)


@dataclass(frozen=True)
class Vote:
    """The sums of the vote's all-reduce, equal on every rank."""

    gradient: GradientKey
    norm_sq: Mapping[BlockKey, float] | Sequence[float]
    """Sum of squares of the raw reduced gradient, for each block that counts in the norm."""
    found_nonfinite: bool
    denominator: float
    """Divisor of summed gradients: all tokens with --calculate-per-token-loss, else the replicas at launch."""
    tokens: float
    samples: int
    """Samples of the global batch (consumed also by a skipped step)."""
    losses: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    ledger_hash: str = ""
    plan_hash: str = ""
    placement: str = ""
    agreed: Agreed = Agreed()
    speeds: tuple[tuple[int, int], ...] = ()
    """Published speeds after this step's measurements."""
    rates: tuple[Rate, ...] = ()
    """Rates by parameter group, from one rank."""
    zeros: int = 0
    """Elements of the gradient that are zero, where they are counted."""
    left_out: bool = False
    """True if nothing was computed from the samples, so that there is no gradient."""
    expert_tokens: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Unit → tokens that each of its experts received, where they are counted."""
    amaxes: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Unit → largest absolute value of each of its tensors in FP8, where scales follow from them."""


def _fp32(value: float) -> float:
    """Return ``value`` rounded to fp32; infinity if it does not fit."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def next_power(power: float, beta: float) -> float:
    """Return ``power * beta``, or 0 below :data:`_NOTHING`: some processors flush subnormal products."""
    product = power * beta
    return product if product >= _NOTHING else 0.0


def power_of(beta: float, steps: int) -> float:
    """Return ``beta ** steps`` by ``steps`` products."""
    power = 1.0
    for _ in range(steps):
        if power == 0.0 or beta == 1.0:
            break
        power = next_power(power, beta)
    return power


def multiplier_of(loss_scale: float, denominator: float) -> float:
    """Return 1/(loss scale · denominator) as in Megatron: the reciprocal of the scale is rounded to fp32 first.

    A denominator of 0 (every label is masked) counts as 1.
    """
    return _fp32(1.0 / loss_scale) / (denominator if denominator > 0 else 1.0)


def advance(previous: StepRecord, vote: Vote, hyper: Hyper) -> StepRecord:
    """Return the record of the next version. Pure: every rank computes the same from the same vote."""
    if vote.gradient.step != previous.version:
        raise ValueError(f"vote on gradients of step {vote.gradient.step} at version {previous.version}")
    if not vote.rates:
        raise ValueError(f"vote at version {previous.version} without learning rates")
    squares = vote.norm_sq.values() if isinstance(vote.norm_sq, Mapping) else vote.norm_sq
    unscale = multiplier_of(previous.loss_scale, vote.denominator)
    norm = _one_nan(_norm(list(squares)) * unscale)
    coefficient = _clip_coefficient(norm, hyper.clip_grad)
    skipped = vote.left_out or (vote.found_nonfinite and hyper.scaler != "none")
    power1, power2 = previous.beta_power1, previous.beta_power2
    if not skipped:
        power1, power2 = next_power(power1, hyper.beta1), next_power(power2, hyper.beta2)
    scale, growth, hysteresis = _next_scale(previous, vote, hyper)
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
        zeros=vote.zeros,
        losses={key: (_one_nan(total), _one_nan(count)) for key, (total, count) in vote.losses.items()},
        ledger_hash=vote.ledger_hash,
        plan_hash=vote.plan_hash,
        gradient=vote.gradient,
        placement=vote.placement or previous.placement,
        undone=previous.undone,
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
        expert_bias=_next_bias(previous, vote, hyper),
        expert_load=_next_load(previous, vote, hyper),
        fp8_scales=_next_scales(previous, vote, hyper),
    )


def _next_bias(previous: StepRecord, vote: Vote, hyper: Hyper) -> str:
    """Return the bias of routers; as in Megatron a step without an update of parameters changes it too."""
    if hyper.balance is None or vote.left_out:
        return previous.expert_bias
    return hyper.balance.advanced(previous.expert_bias, vote.expert_tokens)


def _next_load(previous: StepRecord, vote: Vote, hyper: Hyper) -> str:
    """Return the load of experts. A vote repeated after a loss has the counts of the ranks that are left."""
    if hyper.load is None or vote.left_out:
        return previous.expert_load
    return hyper.load.advanced(previous.expert_load, vote.expert_tokens)


def _next_scales(previous: StepRecord, vote: Vote, hyper: Hyper) -> str:
    """Return the scales of tensors; as in Megatron a step without an update of parameters changes them too."""
    if hyper.scaling is None or vote.left_out:
        return previous.fp8_scales
    return hyper.scaling.advanced(previous.fp8_scales, vote.amaxes)


def _norm(squares: list[float]) -> float:
    if not all(math.isfinite(x) for x in squares):
        return math.nan if any(math.isnan(x) for x in squares) else math.inf
    return math.sqrt(math.fsum(squares))


def _shallow(part: object) -> dict[str, Any]:
    """Return the fields of a record, or of a part of it, as they are: ``asdict`` copies each value within them."""
    return {name: getattr(part, name) for name in _GIVEN[type(part)]}


_GIVEN: Mapping[type, tuple[str, ...]] = {
    kind: tuple(one.name for one in fields(kind) if one.init) for kind in (StepRecord, Rate, Agreed)
}
"""The names of the fields that each is made with."""


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_shallow)
_PACKER = msgspec.msgpack.Encoder(order="sorted")
_values_of = attrgetter(*_GIVEN[StepRecord])
_PIECE = 10
"""Fields of a record that are hashed together."""


def _one_nan(value: float) -> float:
    """Return ``value``; any NaN as the same one, since two kinds of processors may give it another sign."""
    return value if value == value else math.nan


def _clip_coefficient(norm: float, clip_grad: float) -> float:
    if clip_grad <= 0.0:
        return 1.0
    coefficient = clip_grad / (norm + 1.0e-6)
    return coefficient if coefficient < 1.0 else 1.0  # a NaN norm does not clip, as in Megatron


def _next_scale(previous: StepRecord, vote: Vote, hyper: Hyper) -> tuple[float, int, int]:
    """Return (scale, growth tracker, hysteresis tracker) after DynamicGradScaler.update."""
    scale, growth, hysteresis = previous.loss_scale, previous.growth_tracker, previous.hysteresis_tracker
    if hyper.scaler != "dynamic" or vote.left_out:
        return scale, growth, hysteresis
    if vote.found_nonfinite:
        hysteresis -= 1
        if hysteresis <= 0:
            scale = max(_fp32(scale * _fp32(hyper.backoff_factor)), _fp32(hyper.min_loss_scale))
        return scale, 0, hysteresis
    growth += 1
    if growth == hyper.growth_interval:
        return _fp32(scale * _fp32(hyper.growth_factor)), 0, hyper.hysteresis
    return scale, growth, hysteresis
