"""A certificate for each transition: every rank compares the statements of all ranks (``state.certificate``).

Tables are always compared in full. Contents are hashed only of blocks that moved: all of
them at a start or a load, at most :data:`LOOKED_AT_BYTES` while other ranks wait. The rolling
verification compares the rest later. There is one exchange of messages. Every rank certifies
the same statements and therefore comes to the same result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from megatron.elastic.comm.exchange import Exchange, begin_exchange, gather_messages
from megatron.elastic.engine.compute.block_checksums import Disputes
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.transaction.tools import Tools
from megatron.elastic.platform.threads import Threads
from megatron.elastic.state.certificate import (
    Certificate,
    CertificateError,
    ParameterClaim,
    Statement,
    certify,
    state_claims,
)
from megatron.elastic.state.hashing import content_hash
from megatron.elastic.state.layout import BlockKey, UnitLayout
from megatron.elastic.state.placement import Transition as Change
from megatron.elastic.state.placement import UnitGroup
from megatron.elastic.state.record import StepRecord
from megatron.elastic.state.verify import Fingerprint, compare, fingerprints, repairs

__all__ = [
    "ALL_BYTES",
    "LOOKED_AT_BYTES",
    "CertificateOutcome",
    "Examination",
    "Transition",
    "begin_examination",
    "examine_memory",
    "looked_at",
    "name_disputes",
    "statement",
]

Transition = Literal["start", "load", "recovery", "join", "migration", "rolling"]
LOOKED_AT_BYTES = 4 << 20
"""Bytes of state that are hashed while all ranks wait, after a join or a loss."""
Keys = tuple[BlockKey, ...]
Marks = tuple[dict[BlockKey, Fingerprint], dict[BlockKey, str]]
"""Hashes of one rank: of its copies, and of the parameters it computes with."""
ALL_BYTES = 1 << 62
"""Limit at a start or a load, when no training waits."""


@dataclass(frozen=True)
class CertificateOutcome:
    """The result of one certificate, for the event log."""

    transition: Transition
    step: int
    seconds: float
    certificate: Certificate | None
    findings: tuple[str, ...] = ()


def looked_at(
    layouts: Mapping[tuple[int, int], UnitLayout], keys: Iterable[BlockKey], turn: int, limit: int
) -> frozenset[BlockKey]:
    """Return as many of ``keys`` as ``limit`` bytes allow, different ones each ``turn``; equal on every rank."""
    ordered, chosen = sorted(keys), set[BlockKey]()
    start, left = (turn * 31) % max(1, len(ordered)), limit
    for key in ordered[start:] + ordered[:start]:
        left -= 12 * layouts[key[:2]].blocks[key[2]].numel
        if chosen and left < 0:
            break
        chosen.add(key)
    return frozenset(chosen)


def parameter_hashes(arena: Arena, keys: Collection[BlockKey]) -> dict[BlockKey, str]:
    """Return content hashes of the parameters of those ``keys`` that this rank computes with."""
    hashes = {}
    for key in keys:
        place = arena.slices.get(key[:2])
        if place is not None:
            hashes[key] = content_hash(key, arena.block_parameters(place.layout.blocks[key[2]]).detach().cpu())
    return hashes


def statement(
    tools: Tools, view: View, record: StepRecord, parameters: int, contents: Collection[BlockKey]
) -> Statement:
    """Return this rank's statement. ``parameters``: their version; ``contents``: the blocks to hash in full."""
    arena, pool = tools.arena, tools.pool
    cell = view.cell.id if view.cell is not None and view.leads else None
    rows = [row for piece in view.plan.pieces if piece.first == 0 and piece.cell == cell for row in piece.rows]
    made = Statement(
        rank=tools.fabric.rank,
        generation=view.generation,
        placement=view.configuration.digest,
        plan=view.plan.digest,
        record_text=record.to_json(),
        copies=state_claims(pool, view.placement, contents, arena.dtype),
        parameters=ParameterClaim(parameters, tuple(arena.slices), parameter_hashes(arena, contents)),
        rows=tuple(sorted(rows)),
        random_key=(tools.settings.seed, record.version),
    )
    vars(made)["record"] = record  # the value of the cached property
    return made


def begin_examination(
    tools: Tools,
    view: View,
    groups: tuple[UnitGroup, ...],
    mine: Statement,
    transition: Transition,
    saved: Mapping[BlockKey, str] = MappingProxyType({}),
) -> Examination:
    """Begin to exchange and certify statements, and return at once. Collective; all ranks complete it at one place.

    ``saved``: hashes of the contents of a loaded checkpoint, equal on every rank.
    """
    began = tools.threads.monotonic()
    exchange = begin_exchange(tools.fabric, Statement, mine)
    spent = tools.threads.monotonic() - began
    return Examination(tools.threads, view, groups, mine.record.version, transition, saved, exchange, spent)


@dataclass(frozen=True)
class Examination:
    """An examination under way, of the statements made under ``view``."""

    threads: Threads
    view: View
    groups: tuple[UnitGroup, ...]
    step: int
    transition: Transition
    saved: Mapping[BlockKey, str]
    exchange: Exchange
    spent: float
    """Seconds that this rank spent on its begin."""

    def complete(self) -> CertificateOutcome:
        """Wait for all statements and certify them. Findings are in the result, not raised. Raises ``CommError``."""
        began, view, passed, findings = self.threads.monotonic(), self.view, None, tuple[str, ...]()
        statements = self.exchange.complete()
        due = {key: len(copies.mirrors) for key, copies in view.placement.copies.items()}
        rows = view.plan.grid.global_batch_size
        try:
            # Right after a loss the only copy may be on a rank that does not compute its unit.
            parked = self.transition != "start"
            passed = certify(statements, self.groups, due, rows, view.living, parked, view.plan.skipped, self.saved)
        except CertificateError as error:
            findings = error.findings
        seconds = self.spent + self.threads.monotonic() - began
        return CertificateOutcome(self.transition, self.step, seconds, passed, findings)


def name_disputes(tools: Tools, view: View, record: StepRecord, mine: Disputes) -> CertificateOutcome:
    """Return the copies whose history differs from their owner's. That is a bug and ends the job. Collective."""
    findings = tuple(
        f"block {key} at rank {rank} was not made as its owner's (rank {view.placement.owner(key)})"
        for rank, keys in gather_messages(tools.fabric, Keys, mine.marks).items()
        for key in keys
    )
    return CertificateOutcome("rolling", record.version, 0.0, None, findings)


def examine_memory(
    tools: Tools, view: View, groups: tuple[UnitGroup, ...], record: StepRecord, mine: Disputes
) -> tuple[tuple[Change, ...], CertificateOutcome]:
    """Compare copies that have the same history but differ; return the repairs and the findings. Collective.

    Call it between the vote and the update, while the parameters still come from the
    owners' last gather. Returns no changes if the right copy cannot be told from the wrong one.
    """
    began = tools.threads.monotonic()
    suspects = sorted({key for keys in gather_messages(tools.fabric, Keys, mine.contents).values() for key in keys})
    marks = fingerprints(tools.pool, suspects, tools.arena.dtype), parameter_hashes(tools.arena, suspects)
    tables = gather_messages(tools.fabric, Marks, marks)
    found = compare(
        {rank: table for rank, (table, _) in tables.items()},
        view.placement,
        {rank: hashes for rank, (_, hashes) in tables.items()},
    )
    repaired = repairs(found, view.placement, {(group.unit, group.shard): group.holders for group in groups})
    changes = tuple(change for change in repaired if change.kind != "add")
    dropped = {(change.block, change.rank) for change in changes if change.kind == "drop"}
    if any((corruption.block, corruption.rank) not in dropped for corruption in found):
        changes = ()
    return changes, CertificateOutcome(
        "rolling", record.version, tools.threads.monotonic() - began, None, tuple(map(str, found))
    )
