"""The rows of the vocabulary that this rank's cross entropy computes, where ranks do not have equally many.

Megatron's vocabulary-parallel cross entropy, fused or not, derives its first row from the rank and the number of local
rows. In a cell that deals the vocabulary unevenly this is wrong. The loss of such a cell runs inside
:func:`vocabulary_range`, and the replaced function returns that range. Outside, Megatron's function is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from megatron.elastic.mcore.patching.patches import Row, bound

__all__ = ["rows", "vocabulary_range"]

_RANGE: ContextVar[tuple[int, int] | None] = ContextVar("vocabulary_range", default=None)


@contextmanager
def vocabulary_range(first: int, stop: int) -> Iterator[None]:
    """Compute cross entropies of this thread with rows ``[first, stop)`` of the vocabulary inside the context."""
    token = _RANGE.set((first, stop))
    try:
        yield
    finally:
        _RANGE.reset(token)


def rows() -> tuple[Row, ...]:
    """Return the row of the patch table."""
    symbol = "megatron.core.tensor_parallel.utils.VocabUtility.vocab_range_from_per_partition_vocab_size"
    return ((symbol, "a cell of another tensor-parallel size deals the vocabulary unevenly", _uneven),)


def _uneven(original: Callable[..., Any]) -> Callable[..., Any]:
    def vocab_range(*args: Any, **kwargs: Any) -> Any:
        found = _RANGE.get()
        if found is None:
            return original(*args, **kwargs)
        local = bound(original, args, kwargs)["per_partition_vocab_size"]
        if found[1] - found[0] != local:
            raise RuntimeError(f"logits of {local} rows of the vocabulary, where this rank has rows {found}")
        return found

    return vocab_range
