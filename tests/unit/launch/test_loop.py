"""The agent's event loop after its end: its threads may still have something to say."""

from __future__ import annotations

import os
import time

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


def test_calls_that_come_as_fast_as_they_are_made_do_not_keep_timers_from_running() -> None:
    """An agent takes in the journal by such calls, and renews its lease by a timer."""
    loop = Loop()
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if calls < 5000:
            loop.post(call)
        else:
            loop.stop()
        time.sleep(0.001)

    loop.post(call)
    loop.after(0.01, loop.stop)
    loop.run()
    loop.close()
    assert calls < 5000


def test_calls_that_have_come_precede_a_timer_that_is_due() -> None:
    loop = Loop()
    order: list[str] = []
    for number in range(3):
        loop.post(lambda n=number: order.append(f"call {n}"))  # type: ignore[misc]
    loop.after(0.0, lambda: (order.append("timer"), loop.stop())[-1])  # type: ignore[func-returns-value]
    loop.run()
    loop.close()
    assert order == ["call 0", "call 1", "call 2", "timer"]
