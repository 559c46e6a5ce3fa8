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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
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
_LIMBS = DIGEST_BITS // _LIMB_BITS


class _Slot(IntEnum):
    VOTERS = 0
    TOKENS = 1
    OVERFLOWS = 2
    ZEROS = 3
    SAMPLES = 4
    WEIGHTS = 5
    JOINS = 6
    DRAINS = 7
    READY = 8
    DISPUTES = 9
    SUSPECTS = 10
    SAVES = 11
    WRITTEN = 12
    STEADY = 13
    UNANNOUNCED = 14
    # Digests, of _LIMBS slots each.
    NUMBERS = 15
    LOSSES = 18
    INPUTS = 21
    GRADIENTS = 24
    PLAN = 27
    LEAVES = 30
    RESHAPES = 33
    SIZE = 36


def _limbs(value: int) -> list[float]:
    """Return ``value`` (not negative) cut into limbs, lowest first; the last one holds the rest."""
    mask = (1 << _LIMB_BITS) - 1
    low = [float(value >> (_LIMB_BITS * i) & mask) for i in range(_LIMBS - 1)]
    return [*low, float(value >> (_LIMB_BITS * (_LIMBS - 1)))]


def _joined(values: Sequence[float], slot: _Slot) -> int:
    """Return the integer whose summed limbs begin at ``slot``."""
    return sum(int(values[slot + i]) << (_LIMB_BITS * i) for i in range(_LIMBS))


@dataclass
class Tally:
    """One rank's contribution to the vote, or the sum over all ranks."""

    norms: dict[BlockKey, float] = field(default_factory=dict)
    """Sum of squares of the raw reduced gradient, for each block of this rank that counts in the norm."""
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

    @property
    def size(self) -> int:
        """Length of the vector."""
        return self._tokens_at + (0 if self.counted is None else self.counted.size)

    @property
    def _tokens_at(self) -> int:
        return self._rates_at + 2 * self.groups

    @property
    def _rates_at(self) -> int:
        plain = _Slot.SIZE + len(self.blocks) + 2 * len(self.report_keys)
        return plain + 2 * len(self.ranges) + 4 * len(self.clocked)

    def pack(self, tally: Tally) -> torch.Tensor:
        """Return ``tally`` as a float64 vector. Report keys without a slot are left out and counted."""
        counters = {
            _Slot.VOTERS: tally.voters,
            _Slot.TOKENS: tally.tokens,
            _Slot.OVERFLOWS: tally.overflows,
            _Slot.ZEROS: tally.zeros,
            _Slot.SAMPLES: tally.ledger.samples,
            _Slot.WEIGHTS: tally.ledger.weights,
            _Slot.JOINS: tally.joins,
            _Slot.DRAINS: tally.drains,
            _Slot.READY: tally.ready,
            _Slot.DISPUTES: tally.disputes,
            _Slot.SUSPECTS: tally.suspects,
            _Slot.SAVES: tally.saves,
            _Slot.WRITTEN: tally.written,
            _Slot.STEADY: tally.steady,
            _Slot.UNANNOUNCED: tally.unannounced or bool(tally.report.keys() - set(self.report_keys)),
        }
        digests = {
            _Slot.NUMBERS: tally.ledger.numbers,
            _Slot.LOSSES: tally.ledger.losses,
            _Slot.INPUTS: tally.ledger.inputs,
            _Slot.GRADIENTS: tally.ledger.gradients,
            _Slot.PLAN: tally.plan,
            _Slot.LEAVES: tally.leaves,
            _Slot.RESHAPES: tally.reshapes,
        }
        if not tally.norms.keys() <= set(self.blocks):
            raise KeyError(f"norms of blocks without a slot: {sorted(tally.norms.keys() - set(self.blocks))}")
        values: list[float] = [float(counters[slot]) for slot in sorted(counters)]
        values += (limb for slot in sorted(digests) for limb in _limbs(digests[slot]))
        values += (tally.norms.get(key, 0.0) for key in self.blocks)
        values += (part for key in self.report_keys for part in tally.report.get(key, (0.0, 0.0)))
        values += (spent for key in self.ranges for spent in tally.times.get(key, (0, 0)))
        values += (part for cell in self.clocked for part in tally.clocks.get(cell, (0, 0, 0, 0)))
        rates = tally.rates or (Rate(0.0, 0.0),) * self.groups
        values += (part for rate in rates for part in (rate.lr, rate.weight_decay))
        if self.counted is not None:
            none = (0,) * self.counted.experts
            values += (count for unit in self.counted.units for count in tally.expert_tokens.get(unit, none))
        vector = torch.tensor(values, dtype=torch.float64)
        if len(vector) != self.size:
            raise ValueError(f"a tally of {len(vector)} values does not fit into {self.size} slots")
        return vector

    def unpack(self, vector: torch.Tensor) -> Tally:
        """Return the summed vector as the tally of the whole step."""
        values: list[float] = vector.tolist()
        start = _Slot.SIZE + len(self.blocks)
        times = start + 2 * len(self.report_keys)
        clocks = [int(value) for value in values[times + 2 * len(self.ranges) : self._rates_at]]
        rates = values[self._rates_at :]
        return Tally(
            norms=dict(zip(self.blocks, values[_Slot.SIZE : start], strict=True)),
            voters=int(values[_Slot.VOTERS]),
            tokens=values[_Slot.TOKENS],
            overflows=int(values[_Slot.OVERFLOWS]),
            zeros=int(values[_Slot.ZEROS]),
            ledger=Ledger(
                samples=int(values[_Slot.SAMPLES]),
                numbers=_joined(values, _Slot.NUMBERS),
                losses=_joined(values, _Slot.LOSSES),
                inputs=_joined(values, _Slot.INPUTS),
                gradients=_joined(values, _Slot.GRADIENTS),
                weights=values[_Slot.WEIGHTS],
            ),
            plan=_joined(values, _Slot.PLAN),
            joins=int(values[_Slot.JOINS]),
            drains=int(values[_Slot.DRAINS]),
            ready=int(values[_Slot.READY]),
            disputes=int(values[_Slot.DISPUTES]),
            suspects=int(values[_Slot.SUSPECTS]),
            leaves=_joined(values, _Slot.LEAVES),
            reshapes=_joined(values, _Slot.RESHAPES),
            saves=int(values[_Slot.SAVES]),
            written=int(values[_Slot.WRITTEN]),
            steady=int(values[_Slot.STEADY]),
            unannounced=int(values[_Slot.UNANNOUNCED]),
            times={
                key: (int(values[times + 2 * i]), int(values[times + 2 * i + 1])) for i, key in enumerate(self.ranges)
            },
            clocks={
                cell: (clocks[4 * i], clocks[4 * i + 1], clocks[4 * i + 2], clocks[4 * i + 3])
                for i, cell in enumerate(self.clocked)
            },
            report={key: (values[start + 2 * i], values[start + 2 * i + 1]) for i, key in enumerate(self.report_keys)},
            rates=tuple(Rate(rates[2 * i], rates[2 * i + 1]) for i in range(self.groups)),
            expert_tokens=self._tokens(values[self._tokens_at :]),
        )

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
