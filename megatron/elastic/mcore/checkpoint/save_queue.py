"""The queue for results of a synchronous checkpoint write, without a process.

megatron.core starts a ``multiprocessing`` manager for it by 'spawn': at the first
save a new interpreter imports the training script, torch and Megatron (seconds),
and it survives its rank when that is killed. Writer and reader of a synchronous save
are the same process, so ``queue.Queue`` is enough. Megatron's asynchronous saves keep their manager.
"""

from __future__ import annotations

import functools
import importlib
import queue
from collections.abc import Callable
from typing import Any

__all__ = ["make_results_queue"]


def make_results_queue(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``get_write_results_queue`` without a manager, unless Megatron itself writes asynchronously."""
    present: queue.Queue[Any] = queue.Queue()

    @functools.wraps(original)
    def get_write_results_queue(*args: Any, **kwargs: Any) -> Any:
        settings = importlib.import_module("megatron.training.global_vars")
        try:
            # Under --elastic a thread of this process writes.
            synchronous = not settings.get_args().async_save or settings.get_args().elastic
        except AssertionError:  # no arguments in this process: the caller uses megatron.core alone
            synchronous = False
        return present if synchronous else original(*args, **kwargs)

    return get_write_results_queue
