"""The range of the vocabulary in which a cross entropy computes is Megatron's, except inside of a context."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from megatron.core.tensor_parallel.utils import VocabUtility

from megatron.elastic.mcore.model.vocabulary_range import rows, vocabulary_range
from megatron.elastic.mcore.patching.patches import Patch, apply


@pytest.fixture(autouse=True)
def replaced() -> Iterator[None]:
    patch_set = apply([Patch(symbol, reason, make) for symbol, reason, make in rows()])
    yield
    patch_set.undo()


def megatron(local: int, rank: int, size: int) -> tuple[int, int]:
    first, stop = VocabUtility.vocab_range_from_per_partition_vocab_size(local, rank, size)
    return first, stop


def test_inside_it_is_the_given_range_and_outside_equal_parts_by_rank() -> None:
    assert megatron(21, 1, 3) == (21, 42)
    with vocabulary_range(22, 43):
        assert megatron(21, 1, 3) == (22, 43)
        with vocabulary_range(0, 22):
            assert megatron(22, 0, 3) == (0, 22)
        assert megatron(21, 1, 3) == (22, 43)
    assert tuple(VocabUtility.vocab_range_from_global_vocab_size(64, 1, 2)) == (32, 64)


def test_logits_of_another_size_are_refused() -> None:
    with vocabulary_range(22, 43), pytest.raises(RuntimeError, match="logits of 22 rows"):
        megatron(22, 1, 3)


def test_other_threads_are_not_affected() -> None:
    found = list[tuple[int, int]]()
    with vocabulary_range(22, 43):
        other = threading.Thread(target=lambda: found.append(megatron(21, 1, 3)))
        other.start()
        other.join()
    assert found == [(21, 42)]
