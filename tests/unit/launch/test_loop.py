"""The agent's event loop after its end: its threads may still have something to say."""

from __future__ import annotations

import os

from megatron.elastic.launch.agent.loop import Loop


def test_a_post_to_a_closed_loop_does_nothing_and_writes_to_no_descriptor() -> None:
    loop = Loop()
    calls: list[int] = []
    loop.post(lambda: calls.append(1))
    loop.close()
    fresh = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(4)]  # the numbers of the loop's own among them
    try:
        loop.post(lambda: calls.append(2))
        for descriptor in fresh:
            try:
                os.eventfd_read(descriptor)
            except BlockingIOError:
                continue
            raise AssertionError("a closed loop wrote to a descriptor of others")
    finally:
        for descriptor in fresh:
            os.close(descriptor)
    assert calls == []
