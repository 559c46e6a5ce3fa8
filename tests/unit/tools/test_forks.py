"""A forked rank never collects what is garbage in its parent."""

from __future__ import annotations

import gc
import os
from typing import Any

from tools.bench._common import Ranks

FORKING: list[int] = []
"""The processes that fork now: only in their children is anything made before the child's own code."""


class OfTheParent:
    """Garbage that ends any other process that collects it, as the end of missing threads does."""

    def __init__(self) -> None:
        self.cycle, self.pid = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            os._exit(139)


def _make_objects() -> None:
    """Make enough of them for a collection of the youngest generation."""
    if os.getppid() in FORKING:
        assert len([[] for _ in range(10 * gc.get_threshold()[0])]) > 0


os.register_at_fork(after_in_child=_make_objects)


def test_what_the_parent_left_is_not_collected() -> None:
    def body(here: Any) -> str:
        gc.collect()
        return "alive"

    gc.collect()
    OfTheParent()
    FORKING.append(os.getpid())
    try:
        with Ranks(2, body) as ranks:
            assert ranks.results((0, 1)) == {0: "alive", 1: "alive"}
    finally:
        FORKING.clear()
