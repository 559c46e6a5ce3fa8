"""Python's search for cyclic garbage, put off while many objects are made at once.

A plan for thousands of ranks has some 200,000 objects, none of which is garbage. Python looks through all of them again
each time their number has grown by a quarter, which takes longer than to make them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["garbage_later"]


@contextmanager
def garbage_later() -> Iterator[None]:
    """Search for no garbage inside, in any thread; also as a decorator. What refers to no cycle is freed as ever."""
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:  # not where Megatron does it at intervals (--manual-gc)
            gc.enable()
