"""The one all-reduce by which a step commits.

Every living rank adds a float64 vector: one slot a state block for the squared
gradient norm (its owner's), and a few counters. The sum decides the step: the
``StepRecord`` is a pure function of the record before and of this sum, equal on every
rank.

A slot has one contributor or holds integers below 2^53, so the sum does not
depend on the contributors' number or order. The exception are loss sums, which
are added over cells in member order. A digest is too long for one slot: it is cut
into limbs of 21 bits, each summed in a slot of its own, so sums over 2^32
contributors are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TypeVar

import xxhash

from megatron.elastic.control.requests import Pending
from megatron.elastic.engine.compute.clocks import ClockState
from megatron.elastic.engine.compute.ledger import DIGEST_BITS, Ledger
from megatron.elastic.plan.pace import Range
from megatron.elastic.state.expert_layers import ExpertLayers
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.record import Agreed, Rate

__all__ = ["Tally", "VoteLayout", "agreed_by", "plan_digest", "wishes"]

_LIMB_BITS = 21
_LIMBS = 3
assert _LIMBS * _LIMB_BITS >= DIGEST_BITS
_MASK = (1 << _LIMB_BITS) - 1
_Number = TypeVar("_Number", int, float)

# The vector begins with the tokens, the ledger's weights and samples, these counters, and limbs of these digests.
_COUNTERS = (
    *("voters", "overflows", "zeros", "joins", "drains", "ready", "disputes", "suspects"),
    *("saves", "written", "steady", "unannounced"),
)
_LEDGER_DIGESTS = ("numbers", "losses", "inputs", "gradients")
_DIGESTS = ("plan", "leaves", "reshapes")
_COUNTERS_AT = 3
_DIGESTS_AT = _COUNTERS_AT + len(_COUNTERS)
_BLOCKS_AT = _DIGESTS_AT + _LIMBS * (len(_LEDGER_DIGESTS) + len(_DIGESTS))

_counters_of = attrgetter(*_COUNTERS)
_ledger_digests_of = attrgetter(*_LEDGER_DIGESTS)
_digests_of = attrgetter(*_DIGESTS)


def _limbs(value: int) -> tuple[int, ...]:
    """Return ``value`` (not negative) cut into limbs, lowest first; the last one holds the rest."""
    return value & _MASK, value >> _LIMB_BITS & _MASK, value >> 2 * _LIMB_BITS


def _threes(values: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    each = iter(values)
    return zip(each, each, each, strict=True)


def _pairs(values: Iterable[_Number]) -> list[tuple[_Number, _Number]]:
    each = iter(values)
    return list(zip(each, each, strict=True))


@dataclass
class Tally:
    """One rank's contribution to the vote, or the sum over all ranks."""

    norms: dict[BlockKey, float] = field(default_factory=dict)
    """Sum of squares of the raw reduced gradient, for each block of this rank that counts in the norm."""
    squares: Sequence[float] = ()
    """In a sum: those of all blocks, in the order of the layout."""
    voters: int = 1
    tokens: float = 0.0
    overflows: int = 0
    zeros: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    """Samples from which this rank's gradients were computed."""
    plan: int = 0
    """Sum of the voters' plan digests (:func:`plan_digest`)."""
    joins: int = 0
    """Voters that know of a newcomer waiting to be admitted."""
    drains: int = 0
    """Voters that were asked to save and leave."""
    ready: int = 0
    """Voters whose part in the migration under way is done or nearly done."""
    disputes: int = 0
    """Copies whose history differs from their owner's."""
    suspects: int = 0
    """Copies with their owner's history whose contents differ from it."""
    leaves: int = 0
    """Sum of the voters' digests of the ranks that are to leave; 0: none."""
    reshapes: int = 0
    """Sum of the voters' digests of the request for other sizes; 0: none."""
    saves: int = 0
    """Voters that need a checkpoint: one was requested, or the last one was interrupted."""
    written: int = 0
    """Voters whose share of the checkpoint under way is written."""
    steady: int = 0
    """Voters whose measured times are valid for their devices."""
    times: dict[Range, tuple[int, int]] = field(default_factory=dict)
    """Nanoseconds of (forwards, backwards) by cell and unit range, from the first rank of each cell."""
    clocks: dict[int, ClockState] = field(default_factory=dict)
    """Cell → clock range and present clock of its devices, summed over its ranks."""
    report: dict[str, tuple[float, float]] = field(default_factory=dict)
    unannounced: int = 0
    """Voters whose loss function reports a name that the layout has no slot for."""
    rates: tuple[Rate, ...] = ()
    """Rates by parameter group, from the lowest living rank alone: cosines of two ranks may differ in the last bit."""
    expert_tokens: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Unit → tokens that each of its experts received from this rank, where they are counted."""
    rows: tuple[int, ...] = ()
    """Rows of ``ledger.samples``, ascending. Not part of the vector; part of the report if the vote is interrupted."""


@dataclass(frozen=True)
class VoteLayout:
    """The layout of the vector, equal on every rank of a generation."""

    blocks: tuple[BlockKey, ...]
    report_keys: tuple[str, ...]
    ranges: tuple[Range, ...] = ()
    clocked: tuple[int, ...] = ()
    """Cells whose clocks are voted on."""
    groups: int = 0
    """Parameter groups, each with a learning rate and a weight decay."""
    counted: ExpertLayers | None = None
    """Layers whose tokens are counted by expert."""

    @cached_property
    def size(self) -> int:
        """Length of the vector."""
        return self._tokens_at + (0 if self.counted is None else self.counted.size)

    @cached_property
    def _tokens_at(self) -> int:
        return self._rates_at + 2 * self.groups

    @cached_property
    def _rates_at(self) -> int:
        return self._clocks_at + 4 * len(self.clocked)

    @cached_property
    def _clocks_at(self) -> int:
        return self._times_at + 2 * len(self.ranges)

    @cached_property
    def _times_at(self) -> int:
        return self._report_at + 2 * len(self.report_keys)

    @cached_property
    def _report_at(self) -> int:
        return _BLOCKS_AT + len(self.blocks)

    def pack(self, tally: Tally) -> list[float]:
        """Return the vector of ``tally``. Report keys without a slot are left out and counted."""
        ledger = tally.ledger
        values: list[float] = [tally.tokens, ledger.weights, ledger.samples, *_counters_of(tally)]
        if not tally.report.keys() <= set(self.report_keys):
            values[_COUNTERS_AT + _COUNTERS.index("unannounced")] = 1
        for digest in (*_ledger_digests_of(ledger), *_digests_of(tally)):
            values += _limbs(digest)
        norms = [tally.norms.get(key) for key in self.blocks]
        if norms.count(None) != len(norms) - len(tally.norms):
            raise KeyError(f"norms of blocks without a slot: {sorted(tally.norms.keys() - set(self.blocks))}")
        values += [norm or 0.0 for norm in norms]
        for key in self.report_keys:
            values += tally.report.get(key, (0.0, 0.0))
        for span in self.ranges:
            values += tally.times.get(span, (0, 0))
        for cell in self.clocked:
            values += tally.clocks.get(cell, (0, 0, 0, 0))
        for rate in tally.rates or (Rate(0.0, 0.0),) * self.groups:
            values += (rate.lr, rate.weight_decay)
        if self.counted is not None:
            none = (0,) * self.counted.experts
            for unit in self.counted.units:
                values += tally.expert_tokens.get(unit, none)
        if len(values) != self.size:
            raise ValueError(f"a tally of {len(values)} values does not fit into {self.size} slots")
        return values

    def unpack(self, values: Sequence[float]) -> Tally:
        """Return the summed vector as the tally of the whole step."""
        clock = map(int, values[self._clocks_at : self._rates_at])
        limbs = map(int, values[_DIGESTS_AT:_BLOCKS_AT])
        digests = [low + (middle << _LIMB_BITS) + (high << 2 * _LIMB_BITS) for low, middle, high in _threes(limbs)]
        numbers, losses, inputs, gradients, *others = digests
        tokens, weights, samples = values[:_COUNTERS_AT]
        total = Tally(
            tokens=tokens,
            ledger=Ledger(int(samples), numbers, losses, inputs, gradients, weights),
            squares=values[_BLOCKS_AT : self._report_at],
            report=dict(zip(self.report_keys, _pairs(values[self._report_at : self._times_at]), strict=True)),
            times=dict(zip(self.ranges, _pairs(map(int, values[self._times_at : self._clocks_at])), strict=True)),
            clocks=dict(zip(self.clocked, zip(clock, clock, clock, clock, strict=True), strict=True)),
            rates=tuple(Rate(*both) for both in _pairs(values[self._rates_at : self._tokens_at])),
            expert_tokens=self._tokens(values[self._tokens_at :]),
        )
        for name, value in zip(_COUNTERS, values[_COUNTERS_AT:_DIGESTS_AT], strict=True):
            setattr(total, name, int(value))
        for name, value in zip(_DIGESTS, others, strict=True):
            setattr(total, name, value)
        return total

    def _tokens(self, values: Sequence[float]) -> dict[int, tuple[int, ...]]:
        if self.counted is None:
            return {}
        each = self.counted.experts
        return {
            unit: tuple(int(value) for value in values[at * each : (at + 1) * each])
            for at, unit in enumerate(self.counted.units)
        }


def wishes(tally: Tally, requests: Pending) -> None:
    """Put the requests from outside that this rank knows into its tally."""
    tally.joins, tally.drains = requests.join, requests.drain
    tally.leaves, tally.reshapes = _digest(requests.leave), _digest(_reshape(requests))


def agreed_by(total: Tally, requests: Pending) -> Agreed:
    """Return the agreed requests, equal on every rank; ``requests``: those that this rank put in.

    A request from outside is agreed if every voter knew it (the same ranks that are to leave, the same
    request for other sizes). A checkpoint is agreed if one voter needs it.
    """
    leave, reshape = requests.leave, _reshape(requests)
    return Agreed(
        join=total.joins == total.voters,
        drain=total.drains == total.voters,
        save=total.saves > 0,
        written=total.written == total.voters,
        leave=leave if total.leaves == _digest(leave) * total.voters else (),
        reshape=reshape if total.reshapes == _digest(reshape) * total.voters else (),
    )


def _reshape(requests: Pending) -> tuple[int, ...]:
    asked = requests.reshape
    return () if asked is None else (asked.number, *asked.sizes)


def _digest(numbers: Sequence[int]) -> int:
    """Return a digest that is not 0; 0 of no numbers."""
    return 1 + _text_digest(",".join(map(str, numbers))) if numbers else 0


def plan_digest(*agreed: str) -> int:
    """Return the digest of the values that must be equal on all voters (plan, state, record, samples)."""
    return _text_digest("|".join(agreed))


def _text_digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode()) >> (64 - DIGEST_BITS)
