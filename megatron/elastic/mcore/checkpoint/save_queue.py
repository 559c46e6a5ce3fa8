"""The queue for results of a checkpoint write: within the process, and under --elastic one for each save.

megatron.core starts a ``multiprocessing`` manager for it by 'spawn': at the first
save a new interpreter imports the training script, torch and Megatron (seconds),
and it survives its rank when that is killed. Writer and reader of a synchronous save
are the same process, so ``queue.Queue`` is enough. Megatron's asynchronous saves keep their manager.

Under --elastic a thread of this process writes. There a loss may void a save after its files were written. Its
results then stay in the queue. With one queue for all saves, as Megatron has it, the next save would take them for its
own.
"""

from __future__ import annotations

import functools
import importlib
import queue
from collections.abc import Callable
from typing import Any

__all__ = ["make_own_queue", "make_results_queue"]


def make_results_queue(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``get_write_results_queue`` without a manager, unless Megatron writes asynchronously."""

    @functools.wraps(original)
    def get_write_results_queue(*args: Any, **kwargs: Any) -> Any:
        settings = importlib.import_module("megatron.training.global_vars")
        try:
            synchronous = not settings.get_args().async_save
        except AssertionError:  # no arguments in this process: the caller uses megatron.core alone
            synchronous = False
        return queue.Queue() if synchronous else original(*args, **kwargs)

    return get_write_results_queue


def make_own_queue(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``get_write_results_queue`` that gives each save a queue of its own."""

    @functools.wraps(original)
    def get_write_results_queue(*_: Any, **__: Any) -> Any:
        return queue.Queue()

    return get_write_results_queue
