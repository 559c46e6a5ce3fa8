"""Hashes of blocks and records, and lineages: hash chains that replace most comparisons of contents.

Owner and mirror make the same deterministic update, so their states at t+1 are
equal if their states at t, the gradients of t and the records are. A copy's
*lineage* follows this induction: it starts as the hash of the contents and is
extended with the hashes of gradient and record at each step. Equal lineages thus
mean equal contents, unless memory has changed by itself, which the rolling
verification detects (``verify``).

The hash is xxh3_128. It is not cryptographic: it guards against bugs and bit flips,
not against an adversary. Block hashes are keyed with the block's name, so two swapped
blocks of equal contents do not pass.
"""

from __future__ import annotations

import struct

import torch
import xxhash

from megatron.elastic.state.layout import BlockKey

__all__ = ["content_hash", "history_mark", "named_hash", "next_lineage", "tensor_digest", "text_hash"]

_NAME = struct.Struct("<3q")


def tensor_digest(values: torch.Tensor) -> bytes:
    """Return the hash of the bits of a contiguous host tensor of any type, 16 bytes."""
    return xxhash.xxh3_128_digest(values.detach().reshape(-1).view(torch.uint8).numpy().data)


def named_hash(key: BlockKey, digest: bytes) -> str:
    """Return the hash of a block's name and of the digest of its contents."""
    return xxhash.xxh3_128_hexdigest(_NAME.pack(*key) + digest)


def content_hash(key: BlockKey, values: torch.Tensor) -> str:
    """Return the hash of a block's tensor (state [3, numel], master or gradient [numel]) and of the block's name."""
    return named_hash(key, tensor_digest(values))


def text_hash(text: str) -> str:
    """Return the hash of a text."""
    return data_hash(text.encode())


def data_hash(data: bytes) -> str:
    """Return the hash of bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def history_mark(lineage: str, gradient: str) -> bytes:
    """Return 8 bytes that two copies have in common if their lineages and the hashes of their gradients are equal."""
    return xxhash.xxh3_64_digest(f"{lineage}|{gradient}")


def next_lineage(lineage: str, gradient: str, record: str) -> str:
    """Return the lineage after one more step; ``gradient`` is empty for a skipped step."""
    return text_hash(f"{lineage}|{gradient}|{record}")
