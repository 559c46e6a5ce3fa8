"""Gradients that come to be retained: copied, hashed and their squares summed in one pass (``csrc/state/intake.hpp``).

Invariant: digest and sum are those of ``hashing.tensor_digest`` and ``adam.sum_of_squares`` for the same values.
"""

from __future__ import annotations

import torch

from megatron.elastic import _state
from megatron.elastic.state.adam import address_of, sum_of_squares
from megatron.elastic.state.hashing import tensor_digest

__all__ = ["digest_of", "taken_in"]


def taken_in(values: torch.Tensor, memory: torch.Tensor) -> tuple[bytes, float]:
    """Copy ``values`` into ``memory`` (fp32 host tensors of one length that do not overlap).

    Returns the digest of their bits and the sum of their squares. Raises ``ValueError`` for tensors of another kind.
    """
    count = memory.numel()
    if count < _state.FEWEST_TAKEN_IN:
        memory.copy_(values)
        return tensor_digest(memory), sum_of_squares(memory)
    return _state.take_in(address_of(values, count), address_of(memory, count), count)


def digest_of(values: torch.Tensor) -> bytes:
    """Return the digest of the bits of an fp32 host tensor. Raises ``ValueError`` for a tensor of another kind."""
    count = values.numel()
    return (
        _state.hash_of(address_of(values, count), count) if count >= _state.FEWEST_TAKEN_IN else tensor_digest(values)
    )
