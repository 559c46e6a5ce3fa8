"""The certificate that a transition left one consistent state, or the exact findings.

After every change of membership, and after a checkpoint load, each rank makes a
:class:`Statement` of its copies, parameters and samples. All statements are gathered, and
every rank runs :func:`certify` on the same set. It passes only if (docs/design.md
§6)

- placement, plan, generation and record (learning rates, step counters, loss
  scale) are equal on all ranks;
- every block has one owner, a holder of its unit, and k mirrors, all at the
  record's version with equal lineages (``hashing``, ``claims``) and, where contents were
  hashed (moved blocks), equal contents;
- after a load, contents are those that the owners handed to the writers (``saved_contents``);
- every rank's parameters equal the owner's masters and have the record's version;
- each row of the global batch is assigned once;
- the random key of the next step is (seed, version), so no mask is used twice.

A failed certificate raises :class:`CertificateError`: the transition must stop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import torch

from megatron.elastic.state.claims import Claim, Claims, in_agreement
from megatron.elastic.state.hashing import content_hash, data_hash
from megatron.elastic.state.layout import BlockKey, UnitShard
from megatron.elastic.state.placement import Placement, UnitGroup
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import StepRecord

__all__ = ["FEW", "Certificate", "CertificateError", "ParameterClaim", "Statement", "certify", "state_claims"]

FEW = 512
"""Copies that are compared one by one: that takes less time than the first use of tensor operations in a process."""


class CertificateError(RuntimeError):
    """The state after a transition is not consistent; ``findings`` names each fault and its place."""

    def __init__(self, findings: Sequence[str]) -> None:
        shown = "; ".join(findings[:10]) + (f"; and {len(findings) - 10} more" if len(findings) > 10 else "")
        super().__init__(f"certificate failed: {shown}")
        self.findings = tuple(findings)


class ParameterClaim(NamedTuple):
    """A rank's claim about the parameters that it computes with. They are all of one version."""

    version: int
    spaces: tuple[UnitShard, ...]
    contents: Mapping[BlockKey, str]
    """Hashes of the parameters of some blocks."""


@dataclass(frozen=True)
class Statement:
    """All claims of one rank after a transition."""

    rank: int
    generation: int
    placement: str
    plan: str
    record_text: str
    """:attr:`record` as text, in which 2 and 2.0 differ; in a typed message they do not."""
    copies: Claims
    parameters: ParameterClaim
    rows: tuple[int, ...] = ()
    """Rows of the next global batch whose first unit this rank's cell computes (only from the cell's first rank)."""
    random_key: tuple[int, int] = (0, 0)
    """(seed, step) from which the next step's dropout masks are drawn."""

    @cached_property
    def record(self) -> StepRecord:
        """The newest record."""
        return StepRecord.from_json(self.record_text)


@dataclass(frozen=True)
class Certificate:
    """A passed check, for the event log and checkpoint manifests."""

    generation: int
    version: int
    ranks: tuple[int, ...]
    blocks: int
    copies: int
    contents_compared: int
    digest: str
    """Hash over all statements."""


def state_claims(
    pool: StatePool,
    placement: Placement,
    contents: Collection[BlockKey] = (),
    model_dtype: torch.dtype | None = None,
) -> Claims:
    """Return claims about this rank's counted copies that ``placement`` names (others are about to be dropped).

    ``contents``: blocks to hash in full (those that moved).
    ``model_dtype``: also hash the owned masters among them, cast to that type, to compare with parameters.
    """
    claims = {}
    for key in pool:
        copy = pool.get(key)
        if not copy.counted or pool.rank not in placement.copies[key].ranks:
            continue
        role = "owner" if placement.owner(key) == pool.rank else "mirror"
        content = cast = ""
        if key in contents:
            state = copy.store.on_host()
            content = content_hash(key, state)
            cast = content_hash(key, state[0].to(model_dtype)) if model_dtype and role == "owner" else ""
        claims[key] = Claim(role, copy.version, copy.lineage, content, cast)
    return Claims.of(claims)


def certify(
    statements: Mapping[int, Statement],
    groups: Sequence[UnitGroup],
    mirrors: int | Mapping[BlockKey, int],
    rows: int,
    members: Collection[int],
    parked_owners: bool = False,
    left_out: Collection[int] = (),
    saved: Mapping[BlockKey, str] = MappingProxyType({}),
) -> Certificate:
    """Check all ``statements`` of ``members``. Raises :class:`CertificateError` with every finding.

    ``mirrors``: k, or the number of mirrors of each block; ``rows``: the global batch size.
    ``parked_owners``: the owner of a block may be a rank that does not compute its unit (right
    after a loss, if the only copy is there). ``left_out``: rows that the plan deliberately
    leaves out. ``saved``: hashes of the contents that a loaded checkpoint was made from.
    Pure, so all ranks have the same result.
    """
    findings = list(_all_findings(statements, groups, mirrors, rows, members, parked_owners, left_out))
    findings += _not_saved(statements, saved)
    if findings:
        raise CertificateError(findings)
    copies = [statement.copies for statement in statements.values()]
    first = next(iter(statements.values()))
    return Certificate(
        generation=first.generation,
        version=first.record.version,
        ranks=tuple(sorted(statements)),
        blocks=sum(len(group.blocks) for group in groups),
        copies=sum(map(len, copies)),
        contents_compared=sum(len(claims.contents) for claims in copies),
        digest=data_hash(msgspec.msgpack.encode([statements[rank] for rank in sorted(statements)])),
    )


def _all_findings(
    statements: Mapping[int, Statement],
    groups: Sequence[UnitGroup],
    mirrors: int | Mapping[BlockKey, int],
    rows: int,
    members: Collection[int],
    parked_owners: bool,
    left_out: Collection[int],
) -> Iterator[str]:
    for rank in sorted(set(members) - set(statements)):
        yield f"no statement of rank {rank}"
    for rank in sorted(set(statements) - set(members)):
        yield f"statement of rank {rank}, which is not a member"
    if not statements:
        return
    yield from _common(statements)
    version = statements[min(statements)].record.version
    holders = {block.key: group.holders for group in groups for block in group.blocks}
    if isinstance(mirrors, int):
        mirrors = dict.fromkeys(holders, min(mirrors, len(members) - 1))
    claims = {rank: statement.copies for rank, statement in statements.items()}
    many = sum(map(len, claims.values())) > FEW
    if not (many and in_agreement(claims, holders, mirrors, version, parked_owners)):
        yield from _copies(claims, holders, mirrors, version, parked_owners)
    yield from _parameters(statements, groups, version)
    yield from _samples(statements, rows, left_out)
    for rank, statement in sorted(statements.items()):
        if statement.random_key[1] != version:
            yield f"rank {rank} would use the masks of step {statement.random_key[1]} again, the state is at {version}"


def _common(statements: Mapping[int, Statement]) -> Iterator[str]:
    """Yield findings about values that must be equal on all ranks, compared with the most frequent value."""
    for name in ("generation", "placement", "plan"):
        yield from _odd_ones(name, {rank: getattr(s, name) for rank, s in statements.items()})
    if len({s.record_text for s in statements.values()}) > 1:
        for item in fields(StepRecord):
            values = {rank: getattr(s.record, item.name) for rank, s in statements.items()}
            yield from _odd_ones(f"record field {item.name}", values)
    yield from _odd_ones("random seed", {rank: s.random_key[0] for rank, s in statements.items()})


def _odd_ones(name: str, values: Mapping[int, object]) -> Iterator[str]:
    counts = Counter(repr(value) for value in values.values())
    usual = min(counts, key=lambda text: (-counts[text], text))
    for rank, value in sorted(values.items()):
        if repr(value) != usual:
            yield f"rank {rank}: {name} is {value!r}, on other ranks {usual}"


def _copies(
    claims: Mapping[int, Claims],
    holders: Mapping[BlockKey, tuple[int, ...]],
    mirrors: Mapping[BlockKey, int],
    version: int,
    parked_owners: bool,
) -> Iterator[str]:
    held: dict[BlockKey, dict[int, Claim]] = defaultdict(dict)
    for rank, mine in claims.items():
        for key, claim in mine.single.items():
            held[key][rank] = claim
    for key in sorted(held.keys() - holders.keys()):
        yield f"block {key} is held by ranks {sorted(held[key])} but no unit has it"
    for key, ranks in sorted(holders.items()):
        copies = held[key]
        owners = [rank for rank, claim in copies.items() if claim.role == "owner"]
        if len(owners) != 1:
            yield f"block {key} has {'no owner' if not owners else f'owners {sorted(owners)}'}"
            continue
        if owners[0] not in ranks and not parked_owners:
            yield f"block {key} is owned by rank {owners[0]}, which does not compute its unit (ranks {list(ranks)})"
        due = mirrors.get(key, 0)
        if len(copies) != 1 + due:
            yield f"block {key} has {len(copies) - 1} mirrors on ranks {sorted(copies)}, {due} are due"
        yield from _equal_copies(key, owners[0], copies, version)


def _not_saved(statements: Mapping[int, Statement], saved: Mapping[BlockKey, str]) -> Iterator[str]:
    """Yield findings about owned blocks whose contents are not those that their owners handed to the writers."""
    for rank, statement in sorted(statements.items()) if saved else ():
        for key, claim in sorted(statement.copies.single.items()):
            if claim.role == "owner" and claim.content and saved.get(key, claim.content) != claim.content:
                yield f"block {key}, loaded by rank {rank}, is not the state that was saved"


def _equal_copies(key: BlockKey, owner: int, held: Mapping[int, Claim], version: int) -> Iterator[str]:
    reference = held[owner]
    for rank, claim in sorted(held.items()):
        where = f"block {key} at rank {rank} ({claim.role})"
        if claim.version != version:
            yield f"{where} is at version {claim.version}, the record at {version}"
        elif claim.lineage != reference.lineage:
            yield f"{where} was made from other state or gradients than the owner's (rank {owner})"
        elif claim.content and reference.content and claim.content != reference.content:
            yield f"{where} differs in contents from the owner's (rank {owner})"


def _parameters(statements: Mapping[int, Statement], groups: Sequence[UnitGroup], version: int) -> Iterator[str]:
    masters = {key: master for statement in statements.values() for key, master in statement.copies.masters.items()}
    computes: dict[int, list[UnitGroup]] = defaultdict(list)
    for group in groups:
        for rank in group.holders:
            computes[rank].append(group)
    for rank, mine in sorted(computes.items()):
        if rank not in statements:
            continue  # named before
        claim = statements[rank].parameters
        has = frozenset(claim.spaces)
        if claim.version != version:
            yield f"rank {rank} computes with parameters of version {claim.version}, not {version}"
        for group in mine:
            if (group.unit, group.shard) not in has:
                yield f"rank {rank} has no parameters of unit {group.unit}, shard {group.shard}, which it computes"
        for key, content in sorted(claim.contents.items()):
            if claim.version == version and masters.get(key, content) != content:
                yield f"rank {rank}: parameters of block {key} are not their masters"


def _samples(statements: Mapping[int, Statement], rows: int, left_out: Collection[int]) -> Iterator[str]:
    takers: dict[int, list[int]] = defaultdict(list)
    for rank, statement in sorted(statements.items()):
        for row in statement.rows:
            takers[row].append(rank)
    missing = [row for row in range(rows) if row not in takers and row not in left_out]
    if missing:
        yield f"rows {_spans(missing)} of the global batch are assigned to no rank"
    for row, ranks in sorted(takers.items()):
        if not 0 <= row < rows:
            yield f"row {row} is outside the global batch of {rows} (ranks {ranks})"
        elif len(ranks) > 1:
            yield f"row {row} of the global batch is assigned to ranks {ranks}"


def _spans(rows: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for row in rows:
        if spans and spans[-1][1] == row - 1:
            spans[-1][1] = row
        else:
            spans.append([row, row])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
