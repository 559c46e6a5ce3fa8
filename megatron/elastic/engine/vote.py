"""The one all-reduce by which a step commits.

Every living rank adds a float64 vector: one slot a state block for the squared
gradient norm (its owner's), and a few counters. When it has arrived everywhere
the step is decided: the ``StepRecord`` is a pure function of the record
before and of this vector, the same on every rank.

A slot has one contributor or holds integers below 2^53, so the sum does not
depend on who contributed or in which order; loss sums are the exception, they
are added over cells in member order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from megatron.elastic.engine.clocks import ClockState
from megatron.elastic.engine.source import StepAddress
from megatron.elastic.plan.pace import Range
from megatron.elastic.state.layout import BlockKey

__all__ = ["Tally", "VoteLayout", "agreed_by", "check_ledger", "leaving_of", "ledger_digest", "plan_digest", "wishes"]

_MODULUS = 1 << 40
"""Digests are summed over at most 2^13 contributors and must stay exact in float64."""


class _Slot(IntEnum):
    VOTERS = 0
    TOKENS = 1
    OVERFLOWS = 2
    ZEROS = 3
    SAMPLES = 4
    LEDGER = 5
    PLAN = 6
    JOINS = 7
    DRAINS = 8
    READY = 9
    DISPUTES = 10
    SUSPECTS = 11
    LEAVES = 12
    SAVES = 13
    WRITTEN = 14
    STEADY = 15
    SIZE = 16


@dataclass
class Tally:
    """What one rank adds, and, summed, what all ranks agree on."""

    norms: dict[BlockKey, float] = field(default_factory=dict)
    """Sum of squares of the raw reduced gradient, of the blocks this rank owns (those that count)."""
    voters: int = 1
    tokens: float = 0.0
    overflows: int = 0
    zeros: int = 0
    samples: int = 0
    ledger: int = 0
    """Sum of digests of the samples whose loss was computed here, exact."""
    plan: int = 0
    joins: int = 0
    """Voters that know of a newcomer waiting to be admitted."""
    drains: int = 0
    """Voters that were asked to save and leave."""
    ready: int = 0
    """Voters whose part in the movement under way is all but done."""
    disputes: int = 0
    """Copies that were not made as their owner's were."""
    suspects: int = 0
    """Copies made like their owner's that differ from it."""
    leaves: int = 0
    """Sum of digests of the ranks that are to leave, as each voter knows them; 0: none."""
    saves: int = 0
    """Voters for which a checkpoint is due: one was asked for, or the last was cut short."""
    written: int = 0
    """Voters whose share of the checkpoint under way is written."""
    steady: int = 0
    """Voters whose measured times say something about their devices."""
    times: dict[Range, tuple[int, int]] = field(default_factory=dict)
    """Nanoseconds of (forwards, backwards) by cell and unit range, from the first rank of each cell."""
    clocks: dict[int, ClockState] = field(default_factory=dict)
    """By cell: what its devices' clocks can be and are, summed over its ranks."""
    report: dict[str, tuple[float, float]] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    """Rows behind ``samples``, ascending; not part of the vector, reported if the vote is cut short."""


@dataclass(frozen=True)
class VoteLayout:
    """Where what stands in the vector; the same on every rank of a generation."""

    blocks: tuple[BlockKey, ...]
    report_keys: tuple[str, ...]
    ranges: tuple[Range, ...] = ()
    clocked: tuple[int, ...] = ()
    """Cells whose clocks are voted on."""

    @property
    def size(self) -> int:
        """Length of the vector."""
        plain = _Slot.SIZE + len(self.blocks) + 2 * len(self.report_keys)
        return plain + 2 * len(self.ranges) + 4 * len(self.clocked)

    def pack(self, tally: Tally) -> torch.Tensor:
        """``tally`` as a float64 vector. Raises ``KeyError`` for a report key nobody announced."""
        vector = torch.zeros(self.size, dtype=torch.float64)
        counters = (
            tally.voters, tally.tokens, tally.overflows, tally.zeros, tally.samples, tally.ledger, tally.plan,
            tally.joins, tally.drains, tally.ready, tally.disputes, tally.suspects, tally.leaves, tally.saves,
            tally.written, tally.steady,
        )  # fmt: skip
        vector[: _Slot.SIZE] = torch.tensor(counters, dtype=torch.float64)
        at = {key: _Slot.SIZE + i for i, key in enumerate(self.blocks)}
        for key, norm in tally.norms.items():
            vector[at[key]] = norm
        start = _Slot.SIZE + len(self.blocks)
        where = {key: start + 2 * i for i, key in enumerate(self.report_keys)}
        for name, (total, count) in tally.report.items():
            vector[where[name]], vector[where[name] + 1] = total, count
        start += 2 * len(self.report_keys)
        for i, key in enumerate(self.ranges):
            vector[start + 2 * i], vector[start + 2 * i + 1] = tally.times.get(key, (0, 0))
        start += 2 * len(self.ranges)
        for i, cell in enumerate(self.clocked):
            vector[start + 4 * i : start + 4 * i + 4] = torch.tensor(tally.clocks.get(cell, (0, 0, 0, 0)))
        return vector

    def unpack(self, vector: torch.Tensor) -> Tally:
        """The summed vector as a tally of the whole step."""
        values: list[float] = vector.tolist()
        start = _Slot.SIZE + len(self.blocks)
        times = start + 2 * len(self.report_keys)
        clocks = [int(value) for value in values[times + 2 * len(self.ranges) :]]
        return Tally(
            norms=dict(zip(self.blocks, values[_Slot.SIZE : start], strict=True)),
            voters=int(values[_Slot.VOTERS]),
            tokens=values[_Slot.TOKENS],
            overflows=int(values[_Slot.OVERFLOWS]),
            zeros=int(values[_Slot.ZEROS]),
            samples=int(values[_Slot.SAMPLES]),
            ledger=int(values[_Slot.LEDGER]),
            plan=int(values[_Slot.PLAN]),
            joins=int(values[_Slot.JOINS]),
            drains=int(values[_Slot.DRAINS]),
            ready=int(values[_Slot.READY]),
            disputes=int(values[_Slot.DISPUTES]),
            suspects=int(values[_Slot.SUSPECTS]),
            leaves=int(values[_Slot.LEAVES]),
            saves=int(values[_Slot.SAVES]),
            written=int(values[_Slot.WRITTEN]),
            steady=int(values[_Slot.STEADY]),
            times={
                key: (int(values[times + 2 * i]), int(values[times + 2 * i + 1])) for i, key in enumerate(self.ranges)
            },
            clocks={
                cell: (clocks[4 * i], clocks[4 * i + 1], clocks[4 * i + 2], clocks[4 * i + 3])
                for i, cell in enumerate(self.clocked)
            },
            report={
                key: (values[start + 2 * i], values[start + 2 * i + 1]) for i, key in enumerate(self.report_keys)
            },
        )


_LEAVE = "leave:"


def leaving_of(requests: Iterable[str]) -> tuple[int, ...]:
    """Ranks that ``requests`` (pending ones, or a record's agreed ones) ask to leave, ascending."""
    for request in requests:
        if request.startswith(_LEAVE):
            return tuple(int(rank) for rank in request.removeprefix(_LEAVE).split(","))
    return ()


def wishes(tally: Tally, requests: tuple[str, ...]) -> None:
    """Put what was asked of this rank from outside into its vote."""
    tally.joins, tally.drains = "join" in requests, "drain" in requests
    leaving = leaving_of(requests)
    tally.leaves = _digest_of_ranks(leaving) if leaving else 0


def agreed_by(total: Tally, requests: tuple[str, ...]) -> tuple[str, ...]:
    """What follows from the sum, the same on every rank; ``requests``: what this one put in.

    A request from outside counts when every voter knew of it (of the very same ranks,
    for those that are to leave); a checkpoint is due when it is for anybody.
    """
    everybody = {"join": total.joins, "drain": total.drains, "written": total.written}
    agreed = [name for name, count in everybody.items() if count == total.voters]
    if total.saves:
        agreed.append("save")
    leaving = leaving_of(requests)
    if leaving and total.leaves == _digest_of_ranks(leaving) * total.voters:
        agreed.append(_LEAVE + ",".join(map(str, leaving)))
    return tuple(agreed)


def _digest_of_ranks(ranks: Iterable[int]) -> int:
    raw = hashlib.blake2b(",".join(map(str, ranks)).encode(), digest_size=4).digest()
    return 1 + int.from_bytes(raw, "little")


def ledger_digest(samples: Iterable[int]) -> int:
    """Order-free digest of a set of sample numbers: each counted once, sums of two disjoint sets add up."""
    return sum(_digest(sample) for sample in samples)


def plan_digest(plan_hash: str, basis: str) -> int:
    """The hashes of a plan and of what state it runs on, short enough for a slot."""
    return int(hashlib.blake2b(f"{plan_hash}|{basis}".encode(), digest_size=5).hexdigest(), 16) % _MODULUS


def _digest(sample: int) -> int:
    raw = hashlib.blake2b(sample.to_bytes(8, "little"), digest_size=5).digest()
    return int.from_bytes(raw, "little") % (1 << 24)


def check_ledger(total: Tally, address: StepAddress, step: int, skipped: Sequence[int] = ()) -> None:
    """Every sample of the step, but for the rows ``skipped``, was computed exactly once. Raises ``RuntimeError``."""
    left_out = frozenset(skipped)
    expected = [address.first + row for row in range(address.size) if row not in left_out]
    if total.samples != len(expected) or total.ledger != ledger_digest(expected):
        raise RuntimeError(
            f"step {step}: {total.samples} samples were computed, {len(expected)} belong to it; "
            "each must be computed exactly once"
        )
