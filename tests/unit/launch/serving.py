"""Runs an agent's loop until a condition holds."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron.elastic.launch.agent.loop import Loop

PATIENCE = 60.0
"""Seconds."""


def serve(loop: Loop, until: Callable[[], bool]) -> None:
    """Let ``loop`` run until ``until()``; fails after :data:`PATIENCE`."""
    end = time.monotonic() + PATIENCE

    def look() -> None:
        assert time.monotonic() < end
        if until():
            loop.stop()
        else:
            loop.after(0.005, look)

    loop.after(0.005, look)
    loop.run()
