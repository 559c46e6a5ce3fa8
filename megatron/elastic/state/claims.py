"""Claims of ranks about their copies of state, in columns, so that those of thousands of ranks are compared at once.

A job of 4,096 ranks and 50,000 blocks has 100,000 copies, and every rank compares all claims after each loss, while
training waits. :func:`in_agreement` does so by tensor operations. It finds whether there is a fault; where there is
one, :mod:`certificate` names it from the single claims (:attr:`Claims.single`).

Invariant: claims that are in agreement have no fault that the single ones would show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import xxhash

from megatron.elastic.state.layout import BlockKey

__all__ = ["Claim", "Claims", "in_agreement"]

_KEY, _VERSION, _LINEAGE = 12, 8, 16
"""Bytes of one copy in each column."""
_BITS = 20
"""Bits of each part of a block's key where a key is one integer."""


class Claim(NamedTuple):
    """A rank's claim about one copy. ``content``: hash of its contents, or '' if not computed."""

    role: str
    version: int
    lineage: str
    content: str = ""
    master: str = ""
    """Hash of an owner's master cast to the parameters' type; compared with that of parameters."""


@dataclass(frozen=True)
class Claims:
    """The claims of one rank, a row a copy. Raises ``ValueError`` for columns of unlike lengths."""

    keys: bytes = b""
    """Unit, shard and number of the block: three int32."""
    owned: bytes = b""
    """Not 0 if the copy is the owner's: one byte."""
    versions: bytes = b""
    """int64."""
    lineages: bytes = b""
    """The bytes of the lineage: 16."""
    contents: Mapping[BlockKey, str] = field(default_factory=dict)
    """Hashes of the contents of some copies."""
    masters: Mapping[BlockKey, str] = field(default_factory=dict)
    """:attr:`Claim.master` of some copies."""

    def __post_init__(self) -> None:
        lengths = len(self.keys), len(self.versions), len(self.lineages)
        if lengths != tuple(len(self) * each for each in (_KEY, _VERSION, _LINEAGE)):
            raise ValueError(f"columns of {lengths} bytes for {len(self)} copies")

    @classmethod
    def of(cls, claims: Mapping[BlockKey, Claim]) -> Claims:
        """Return ``claims`` in columns."""
        return cls(
            b"".join(part.to_bytes(4, "little", signed=True) for key in claims for part in key),
            bytes(claim.role == "owner" for claim in claims.values()),
            b"".join(claim.version.to_bytes(8, "little", signed=True) for claim in claims.values()),
            b"".join(_bytes_of(claim.lineage) for claim in claims.values()),
            {key: claim.content for key, claim in claims.items() if claim.content},
            {key: claim.master for key, claim in claims.items() if claim.master},
        )

    def __len__(self) -> int:
        return len(self.owned)

    @cached_property
    def single(self) -> Mapping[BlockKey, Claim]:
        """Each claim by its block."""
        keys = [(unit, shard, number) for unit, shard, number in _column([self.keys], torch.int32).view(-1, 3).tolist()]
        versions = _column([self.versions], torch.int64).tolist()
        found = dict[BlockKey, Claim]()
        for row, (key, owned, version) in enumerate(zip(keys, self.owned, versions, strict=True)):
            lineage = self.lineages[row * _LINEAGE : (row + 1) * _LINEAGE].hex()
            content, master = self.contents.get(key, ""), self.masters.get(key, "")
            found[key] = Claim("owner" if owned else "mirror", version, lineage, content, master)
        return found


def in_agreement(
    claims: Mapping[int, Claims],
    holders: Mapping[BlockKey, tuple[int, ...]],
    mirrors: Mapping[BlockKey, int],
    version: int,
    parked_owners: bool,
) -> bool:
    """Return whether ``claims``, by rank, are without a fault; False also where only single claims can tell.

    Each block of ``holders`` has an owner, one of its holders unless ``parked_owners``, and as many mirrors as
    ``mirrors`` says, all at ``version`` with the owner's lineage. Contents of a block are equal as far as they are
    known, and there are no other blocks.
    """
    ranks = sorted(claims)
    all_of = [claims[rank] for rank in ranks]
    parts = _column((one.keys for one in all_of), torch.int32).view(-1, 3).long()
    if bool(((parts < 0) | (parts >= 1 << _BITS)).any()):
        return False
    keys = (parts[:, 0] << 2 * _BITS) | (parts[:, 1] << _BITS) | parts[:, 2]
    owned = _column((one.owned for one in all_of), torch.uint8) != 0
    order = torch.argsort(2 * keys + (~owned).long())  # the owner's copy before the others of its block
    keys, owned = keys[order], owned[order]
    begins = torch.ones_like(owned)
    begins[1:] = keys[1:] != keys[:-1]
    first = begins.nonzero().flatten()
    due = sorted(holders)
    packed = [(unit << 2 * _BITS) | (shard << _BITS) | number for unit, shard, number in due]
    if not torch.equal(keys[first], torch.tensor(packed, dtype=torch.int64)):
        return False
    counts = torch.diff(first, append=torch.tensor([len(keys)]))
    if not torch.equal(counts, torch.tensor([1 + mirrors.get(key, 0) for key in due], dtype=torch.int64)):
        return False
    if not bool(owned[first].all()) or int(owned.sum()) != len(due):
        return False
    if bool((_column((one.versions for one in all_of), torch.int64) != version).any()):
        return False
    lineages = _column((one.lineages for one in all_of), torch.int64).view(-1, 2)[order]
    if not torch.equal(lineages, lineages[first].repeat_interleave(counts, dim=0)):
        return False
    if not parked_owners:
        by_row = torch.tensor(ranks).repeat_interleave(torch.tensor([len(one) for one in all_of]))
        owners = by_row[order][first].tolist()
        if not all(owner in holders[key] for key, owner in zip(due, owners, strict=True)):
            return False
    return _equal_contents(all_of)


def _equal_contents(claims: Iterable[Claims]) -> bool:
    known = dict[BlockKey, str]()
    pairs = (pair for one in claims for pair in one.contents.items())
    return all(not content or known.setdefault(key, content) == content for key, content in pairs)


def _bytes_of(lineage: str) -> bytes:
    """Return the 16 bytes of a lineage; its hash if it is none that :mod:`hashing` makes: copies bring theirs along."""
    try:
        found = bytes.fromhex(lineage)
    except ValueError:
        found = b""
    return found if len(found) == _LINEAGE else xxhash.xxh3_128_digest(lineage)


def _column(parts: Iterable[bytes], kind: torch.dtype) -> torch.Tensor:
    """Return a column of several ranks, one after the other."""
    whole = bytearray().join(parts)
    return torch.frombuffer(whole, dtype=kind) if whole else torch.empty(0, dtype=kind)
