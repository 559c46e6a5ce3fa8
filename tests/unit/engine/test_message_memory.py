"""Memory for messages that a thread prepares is handed out once; other sizes get new memory."""

from __future__ import annotations

import torch

from megatron.elastic.engine.compute.message_memory import MessageMemory


def test_prepared_memory_is_handed_out_once() -> None:
    memory = MessageMemory()
    memory.prepare([5, 5, 8])
    assert memory.left == [5, 5, 8]
    prepared = {memory.take(5).data_ptr(), memory.take(5).data_ptr(), memory.take(8).data_ptr()}
    assert len(prepared) == 3 and not memory.left
    taken = memory.take(5)
    assert taken.dtype == torch.float32 and taken.shape == (5,)


def test_a_size_that_was_not_prepared_leaves_the_others() -> None:
    memory = MessageMemory()
    memory.prepare([5])
    assert memory.take(6).shape == (6,)
    assert not memory.take(5).any(), "this one was written when it was prepared"


def test_nothing_is_kept_after_clear() -> None:
    memory = MessageMemory()
    memory.prepare([4])
    memory.clear()
    assert not memory.left
