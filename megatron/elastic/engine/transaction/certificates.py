"""A transition proves itself before work goes on: statements of all ranks, compared by all (``state.certificate``).

Tables are compared everywhere. Contents are hashed where something moved, all of them
at a start or a load, at most :data:`LOOKED_AT_BYTES` while others wait; what is left
over is compared later, by the rolling verification. One exchange, no rank decides alone:
each certifies the same statements and comes to the same end.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from megatron.elastic.comm.exchange import gather_messages
from megatron.elastic.engine.compute.block_checksums import Disputes
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.transaction.phases import Tools
from megatron.elastic.state.certificate import (
    Certificate,
    CertificateError,
    ParamClaim,
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
    "Transition",
    "examine",
    "examine_memory",
    "looked_at",
    "name_disputes",
    "statement",
]

Transition = Literal["start", "load", "recovery", "join", "migration", "rolling"]
LOOKED_AT_BYTES = 4 << 20
"""State of which contents are hashed while everybody waits for a rank that joined, or that was lost."""
Keys = tuple[BlockKey, ...]
Marks = tuple[dict[BlockKey, Fingerprint], dict[BlockKey, str]]
"""Of one rank: of its copies, and of the parameters it computes with."""
ALL_BYTES = 1 << 62
"""At a start or a load: nobody is kept from training yet."""


@dataclass(frozen=True)
class CertificateOutcome:
    """How one certificate ended, for the event log."""

    transition: Transition
    step: int
    seconds: float
    certificate: Certificate | None
    findings: tuple[str, ...] = ()


def looked_at(
    layouts: Mapping[tuple[int, int], UnitLayout], keys: Iterable[BlockKey], turn: int, limit: int
) -> frozenset[BlockKey]:
    """As many of ``keys`` as ``limit`` bytes allow, others each ``turn``; the same on every rank."""
    ordered, chosen = sorted(keys), set[BlockKey]()
    start, left = (turn * 31) % max(1, len(ordered)), limit
    for key in ordered[start:] + ordered[:start]:
        left -= 12 * layouts[key[:2]].blocks[key[2]].numel
        if chosen and left < 0:
            break
        chosen.add(key)
    return frozenset(chosen)


def parameter_hashes(arena: Arena, keys: Collection[BlockKey]) -> dict[BlockKey, str]:
    """Content hashes of the parameters this rank computes with, of those of ``keys`` it has."""
    hashes = {}
    for key in keys:
        place = arena.slices.get(key[0])
        if place is not None and place.layout.shard == key[1]:
            block = place.layout.blocks[key[2]]
            hashes[key] = content_hash(key, arena.unit_parameters(key[0])[block.start : block.stop].detach().cpu())
    return hashes


def statement(
    tools: Tools, view: View, record: StepRecord, parameters: int, contents: Collection[BlockKey]
) -> Statement:
    """What this rank holds and will do. ``parameters`` is their version; ``contents`` are the blocks hashed in full."""
    arena, pool = tools.arena, tools.pool
    hashes = parameter_hashes(arena, contents)
    held = (block.key for place in arena.slices.values() for block in place.layout.blocks)
    params = {key: ParamClaim(parameters, hashes.get(key, "")) for key in held}
    cell = view.cell.id if view.cell is not None and view.shard == 0 else None
    rows = [row for piece in view.plan.pieces if piece.first == 0 and piece.cell == cell for row in piece.rows]
    return Statement(
        rank=tools.fabric.rank,
        generation=view.generation,
        placement=view.configuration.digest,
        plan=view.plan_hash,
        record=record,
        blocks=state_claims(pool, view.placement, contents, arena.dtype),
        params=params,
        rows=tuple(sorted(rows)),
        random_key=(tools.settings.seed, record.version),
    )


def examine(
    tools: Tools,
    view: View,
    groups: tuple[UnitGroup, ...],
    mine: Statement,
    transition: Transition,
) -> CertificateOutcome:
    """Exchange statements and certify them. Never raises for a finding: the verdict has it."""
    began, step = time.monotonic(), mine.record.version
    texts = gather_messages(tools.fabric, str, mine.text)
    statements = {rank: Statement.from_json(text) for rank, text in texts.items()}
    due = {key: len(copies.mirrors) for key, copies in view.placement.copies.items()}
    rows = view.plan.grid.global_batch_size
    try:
        # Right after a loss the only copy may lie with a rank that does not compute its unit.
        parked = transition != "start"
        passed = certify(statements, groups, due, rows, view.living, parked, view.plan.skipped)
    except CertificateError as error:
        return CertificateOutcome(transition, step, time.monotonic() - began, None, error.findings)
    return CertificateOutcome(transition, step, time.monotonic() - began, passed)


def name_disputes(tools: Tools, view: View, record: StepRecord, mine: Disputes) -> CertificateOutcome:
    """Which copies were not made as their owners' were: a bug, that ends the job. Collective."""
    findings = tuple(
        f"block {key} at rank {rank} was not made as its owner's (rank {view.placement.owner(key)})"
        for rank, keys in gather_messages(tools.fabric, Keys, mine.marks).items()
        for key in keys
    )
    return CertificateOutcome("rolling", record.version, 0.0, None, findings)


def examine_memory(
    tools: Tools, view: View, record: StepRecord, mine: Disputes
) -> tuple[tuple[Change, ...], CertificateOutcome]:
    """Copies made alike differ. What is to be promoted and dropped for it, and what was found. Collective.

    To be called between the vote and the update, while the parameters are still those
    that owners gathered out. No changes: nobody can tell which copy is right.
    """
    began = time.monotonic()
    suspects = sorted({key for keys in gather_messages(tools.fabric, Keys, mine.contents).values() for key in keys})
    marks = fingerprints(tools.pool, suspects, tools.arena.dtype), parameter_hashes(tools.arena, suspects)
    tables = gather_messages(tools.fabric, Marks, marks)
    found = compare(
        {rank: table for rank, (table, _) in tables.items()},
        view.placement,
        {rank: hashes for rank, (_, hashes) in tables.items()},
    )
    changes = tuple(change for change in repairs(found, view.placement) if change.kind != "add")
    dropped = {(change.block, change.rank) for change in changes if change.kind == "drop"}
    if any((corruption.block, corruption.rank) not in dropped for corruption in found):
        changes = ()
    return changes, CertificateOutcome(
        "rolling", record.version, time.monotonic() - began, None, tuple(map(str, found))
    )
