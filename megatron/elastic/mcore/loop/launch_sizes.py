"""Patches that keep the launch's sizes in Megatron's loop, and omit collectives that could wait for lost ranks.

Sizes, ranks and the names of random states stay those of the launch when groups change.
Barriers that only align clocks are omitted, and reductions of values that every rank has.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import get_args, training

from megatron.elastic.mcore.parallel_state.stage import GroupStandIn
from megatron.elastic.mcore.patching.patches import Row, bound

__all__ = ["pin_sizes", "rows"]


def rows() -> tuple[Row, ...]:
    """(symbol, reason, replacement) for the patch table."""
    timer, aligns = "megatron.core.timers.Timer.", "a barrier that only aligns clocks would wait for lost ranks"
    return (
        (
            "megatron.training.checkpointing.get_rng_state",
            "random states are named by the launch's stage, also when groups have lost members",
            _launch_rng_state,
        ),
        ("megatron.training.training.print_datetime", aligns, _without_barrier),
        (
            "megatron.training.utils.reduce_max_stat_across_model_parallel_group",
            "every rank has the value; a collective between steps would end the rank when another is lost",
            _known,
        ),
        ("megatron.training.utils.append_to_progress_log", aligns, _to_progress_log),
        (
            "megatron.training.training.compute_throughputs_and_append_to_progress_log",
            "the rank that writes the file is the only one that reads it, so no barrier is needed",
            _on_rank_0,
        ),
        (timer + "start", aligns + "; a repeated phase may start twice", _starts_once),
        (timer + "stop", aligns + "; a repeated phase may stop twice", _stops_once),
    )


def pin_sizes() -> None:
    """Pin Megatron's sizes and ranks to those of the launch."""
    parallel_state.set_tensor_model_parallel_rank(parallel_state.get_tensor_model_parallel_rank())
    parallel_state.set_tensor_model_parallel_world_size(parallel_state.get_tensor_model_parallel_world_size())
    parallel_state.set_pipeline_model_parallel_rank(parallel_state.get_pipeline_model_parallel_rank())
    parallel_state.set_pipeline_model_parallel_world_size(parallel_state.get_pipeline_model_parallel_world_size())
    parallel_state.set_data_parallel_rank(parallel_state.get_data_parallel_rank())
    parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE = parallel_state.get_data_parallel_world_size()


def _launch_rng_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        call, state = bound(original, args, kwargs), parallel_state
        groups = {
            "tp_group": GroupStandIn(
                state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
            ),
            "pp_group": GroupStandIn(
                state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
            ),
        }
        return original(**{**call, **{name: group for name, group in groups.items() if name in call}})

    return replacement


def _known(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> float | None:
        stat: float | None = bound(original, args, kwargs)["stat"]
        return stat if stat is None else torch.tensor(stat, dtype=torch.float32).item()  # as Megatron logs it

    return replacement


def _to_progress_log(original: Callable[..., Any]) -> Callable[..., Any]:
    """Append to the file of --log-progress, in a folder that is made, without a barrier."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> None:
        call = bound(original, args, kwargs)
        with _no_progress_named():
            if dist.get_rank() == 0 and get_args().save is not None:
                os.makedirs(get_args().save, exist_ok=True)
            original(**{**call, "barrier": False})

    return replacement


def _on_rank_0(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have only the rank that appends to the file of --log-progress read it: no other rank finds half a line."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> None:
        with _no_progress_named():
            if dist.get_rank() == 0:
                original(*args, **kwargs)

    return replacement


@contextmanager
def _no_progress_named() -> Iterator[None]:
    """Print a line if the file of --log-progress cannot be read or written, and go on."""
    try:
        yield
    except OSError as error:
        print(f"--log-progress: a line could not be written: {error}; training goes on (--save)", flush=True)


def _without_barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(string: str, override_timestamp: float | None = None) -> None:
        moment = datetime.now() if override_timestamp is None else datetime.fromtimestamp(override_timestamp)
        training.print_rank_0(f"[{string}] datetime: {moment:%Y-%m-%d %H:%M:%S.%f} ")

    return replacement


def _starts_once(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start(self: Any, barrier: bool = False) -> None:
        if not self._started:
            original(self, barrier=False)

    return start


def _stops_once(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def stop(self: Any, barrier: bool = False) -> None:
        if self._started:
            original(self, barrier=False)

    return stop
