"""The one all-reduce by which a step commits.

Every living rank adds fp64 values: one slot a state block for the squared gradient norm (its owner's), and what else
is measured; and counts: natural numbers, digests among them. The sums decide the step: the ``StepRecord`` is a pure
function of the record before and of these sums, equal on every rank.

A value's slot has one contributor or holds integers below 2^53, and counts are added exactly, so the sums do not
depend on the contributors' number or order. The exception are loss sums, which are added over cells in member order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import xxhash

from megatron.elastic.control.requests import Pending
from megatron.elastic.engine.compute.clocks import ClockState
from megatron.elastic.engine.compute.ledger import DIGEST_BITS, Ledger
from megatron.elastic.plan.pace import Range
from megatron.elastic.state.expert_layers import ExpertLayers
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.record import Agreed, Rate

__all__ = ["Tally", "VoteLayout", "agreed_by", "mean_of", "plan_digest", "wishes"]


@dataclass
class Tally:
    """One rank's contribution to the vote, or the sum over all ranks. Its integers are counts."""

    voters: int = 1
    overflows: int = 0
    zeros: int = 0
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
    unannounced: int = 0
    """Voters whose loss function reports a name that the layout has no slot for."""
    _: KW_ONLY
    tokens: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    """Samples from which this rank's gradients were computed."""
    norms: dict[BlockKey, float] = field(default_factory=dict)
    """Sum of squares of the raw reduced gradient, for each block of this rank that counts in the norm."""
    squares: Sequence[float] = ()
    """In a sum: those of all blocks, in the order of the layout."""
    report: dict[str, tuple[float, float]] = field(default_factory=dict)
    times: dict[Range, tuple[int, int]] = field(default_factory=dict)
    """Nanoseconds of (forwards, backwards) by cell and unit range, from the first rank of each cell."""
    clocks: dict[int, ClockState] = field(default_factory=dict)
    """Cell → clock range and present clock of its devices, summed over its ranks."""
    rates: tuple[Rate, ...] = ()
    """Rates by parameter group, from the lowest living rank alone: cosines of two ranks may differ in the last bit."""
    expert_tokens: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Unit → tokens that each of its experts received from this rank, where they are counted."""
    rows: tuple[int, ...] = ()
    """Rows of ``ledger.samples``, ascending. Not part of the sums; part of the report if the vote is interrupted."""


# The values begin with the tokens and the ledger's weights; the counts are the ledger's and the tally's.
_COUNTS = tuple(one.name for one in fields(Tally) if one.type == "int")
_LEDGER_COUNTS = ("samples", "numbers", "losses", "inputs", "gradients")
_UNANNOUNCED_AT = len(_LEDGER_COUNTS) + _COUNTS.index("unannounced")
_BLOCKS_AT = 2

_counts_of = attrgetter(*_COUNTS)
_ledger_counts_of = attrgetter(*_LEDGER_COUNTS)


class _Slots(NamedTuple):
    """The first slot of each kind of value behind the norms."""

    report: int
    times: int
    clocks: int
    rates: int
    tokens: int
    end: int


@dataclass(frozen=True)
class VoteLayout:
    """The layout of the values, equal on every rank of a generation."""

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
    def _at(self) -> _Slots:
        report = _BLOCKS_AT + len(self.blocks)
        times = report + 3 * len(self.report_keys)
        clocks = times + 2 * len(self.ranges)
        rates = clocks + 4 * len(self.clocked)
        tokens = rates + 2 * self.groups
        return _Slots(report, times, clocks, rates, tokens, tokens + (0 if self.counted is None else self.counted.size))

    def pack(self, tally: Tally) -> tuple[list[float], list[int]]:
        """Return the values and the counts of ``tally``. Report keys without a slot are left out and counted."""
        ledger, report = tally.ledger, tally.report
        counts: list[int] = [*_ledger_counts_of(ledger), *_counts_of(tally)]
        values: list[float] = [tally.tokens, ledger.weights]
        norms = [tally.norms.get(key) for key in self.blocks]
        if norms.count(None) != len(norms) - len(tally.norms):
            raise KeyError(f"norms of blocks without a slot: {sorted(tally.norms.keys() - set(self.blocks))}")
        values += [norm or 0.0 for norm in norms]
        for key in self.report_keys:
            values += (*report[key], 1.0) if key in report else (0.0, 0.0, 0.0)
        if any(key not in self.report_keys for key in report):
            counts[_UNANNOUNCED_AT] = 1
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
        if len(values) != self._at.end:
            raise ValueError(f"a tally of {len(values)} values does not fit into {self._at.end} slots")
        return values, counts

    def unpack(self, values: Sequence[float], counts: Sequence[int]) -> Tally:
        """Return the sums as the tally of the whole step."""
        at = self._at
        samples, numbers, losses, inputs, gradients, *others = counts
        times, clocks = list(map(int, values[at.times : at.clocks])), map(int, values[at.clocks : at.rates])
        return Tally(
            *others,
            tokens=values[0],
            ledger=Ledger(samples, numbers, losses, inputs, gradients, values[1]),
            squares=values[_BLOCKS_AT : at.report],
            report=self._reported(values[at.report : at.times]),
            times=dict(zip(self.ranges, zip(times[::2], times[1::2], strict=True), strict=True)),
            clocks=dict(zip(self.clocked, zip(clocks, clocks, clocks, clocks, strict=True), strict=True)),
            rates=tuple(map(Rate, values[at.rates : at.tokens : 2], values[at.rates + 1 : at.tokens : 2])),
            expert_tokens=self._tokens(values[at.tokens :]),
        )

    def _reported(self, values: Sequence[float]) -> dict[str, tuple[float, float]]:
        """Return the sums of the names that some rank has reported. A count of 0 is a mean of no tokens."""
        each = zip(self.report_keys, values[::3], values[1::3], values[2::3], strict=True)
        return {key: (total, count) for key, total, count, ranks in each if ranks}

    def _tokens(self, values: Sequence[float]) -> dict[int, tuple[int, ...]]:
        if self.counted is None:
            return {}
        each = self.counted.experts
        return {
            unit: tuple(int(value) for value in values[at * each : (at + 1) * each])
            for at, unit in enumerate(self.counted.units)
        }


def mean_of(total: float, count: float) -> float:
    """Return a reported mean; NaN of no tokens (all are masked), as Megatron computes it."""
    return total / count if count else math.nan


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
