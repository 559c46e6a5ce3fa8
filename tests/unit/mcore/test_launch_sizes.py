"""Megatron's loop keeps the launch's sizes and waits for no rank only to align clocks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.timers import Timer
from megatron.training import checkpointing, training, utils

from megatron.elastic.mcore.loop import launch_sizes
from megatron.elastic.mcore.parallel_state.stage import GroupStandIn

REPLACED: dict[str, Callable[..., Any]] = {symbol: make for symbol, _, make in launch_sizes.rows()}
SIZES = {
    "get_tensor_model_parallel_rank": ("_TENSOR_MODEL_PARALLEL_GROUP", 1),
    "get_tensor_model_parallel_world_size": ("_TENSOR_MODEL_PARALLEL_GROUP", 2),
    "get_pipeline_model_parallel_rank": ("_PIPELINE_MODEL_PARALLEL_GROUP", 2),
    "get_pipeline_model_parallel_world_size": ("_PIPELINE_MODEL_PARALLEL_GROUP", 3),
    "get_data_parallel_rank": ("_DATA_PARALLEL_GROUP", 3),
    "get_data_parallel_world_size": ("_DATA_PARALLEL_GROUP", 4),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Groups of the launch: tensor 1 of 2, pipeline 2 of 3, data 3 of 4; every pinned value is undone."""
    for name in vars(parallel_state):
        if name.startswith("_MPU_") and name.endswith(("_RANK", "_WORLD_SIZE")):
            monkeypatch.setattr(parallel_state, name, None)
    for name, group in {
        "_TENSOR_MODEL_PARALLEL_GROUP": GroupStandIn(1, 2),
        "_PIPELINE_MODEL_PARALLEL_GROUP": GroupStandIn(2, 3),
        "_DATA_PARALLEL_GROUP": GroupStandIn(3, 4),
        "_DATA_PARALLEL_GROUP_WITH_CP": GroupStandIn(3, 4),
    }.items():
        monkeypatch.setattr(parallel_state, name, group)
    monkeypatch.setattr(dist, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.size())
    return monkeypatch


def test_sizes_and_ranks_stay_when_every_group_has_lost_members(launched: pytest.MonkeyPatch) -> None:
    launch_sizes.pin_sizes()
    for name in {group for group, _ in SIZES.values()} | {"_DATA_PARALLEL_GROUP_WITH_CP"}:
        launched.setattr(parallel_state, name, GroupStandIn(0, 1))
    assert {name: getattr(parallel_state, name)() for name in SIZES} == {n: value for n, (_, value) in SIZES.items()}


def test_random_states_are_named_by_the_stage_of_the_launch(launched: pytest.MonkeyPatch) -> None:
    """Also where the groups that Megatron hands over have shrunk."""
    launch_sizes.pin_sizes()
    shrunk = GroupStandIn(0, 1)
    launched.setattr(checkpointing, "get_args", lambda: type("Args", (), {"data_parallel_random_init": False}))
    launched.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    named = REPLACED["megatron.training.checkpointing.get_rng_state"](checkpointing.get_rng_state)
    found = named("torch_dist", shrunk, shrunk)
    assert found.key == "rng_state" and found.global_shape == (3, 2) and found.global_offset == (2, 1)


def test_a_phase_that_is_repeated_starts_and_stops_its_timer_twice_without_a_barrier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def waits(*_: object, **__: object) -> None:
        pytest.fail("a barrier would wait for lost ranks")

    monkeypatch.setattr(dist, "barrier", waits)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    for verb in ("start", "stop"):
        replaced = REPLACED[f"megatron.core.timers.Timer.{verb}"](getattr(Timer, verb))
        monkeypatch.setattr(Timer, verb, replaced)
    timer = Timer("forward")
    timer.stop(barrier=True)
    timer.start(barrier=True)
    began = timer._start_time
    timer.start(barrier=True)
    assert timer._started and timer._start_time == began, "the phase began with its first attempt"
    timer.stop(barrier=True)
    took = timer._elapsed
    timer.stop(barrier=True)
    assert not timer._started and timer._elapsed == took > 0


def test_the_date_is_printed_in_megatrons_words_without_a_barrier(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, barriers = training.print_datetime, list[object]()
    monkeypatch.setattr(dist, "barrier", lambda *_: barriers.append(_))
    REPLACED["megatron.training.training.print_datetime"](original)("after model is built", 86400.5)
    ours = capsys.readouterr().out
    assert not barriers
    original("after model is built", 86400.5)
    assert ours == capsys.readouterr().out and barriers


@pytest.mark.parametrize(("value", "logged"), [(0.25, 0.25), (0.1, 0.10000000149011612), (None, None)])
def test_a_logged_value_that_every_rank_has_is_reduced_over_none(
    monkeypatch: pytest.MonkeyPatch, value: float | None, logged: float | None
) -> None:
    """A loss would interrupt it beside the step, on every rank that is there. It is rounded as Megatron's."""
    name = "reduce_max_stat_across_model_parallel_group"
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: pytest.fail("a collective"))
    assert REPLACED[f"megatron.training.utils.{name}"](getattr(utils, name))(value) == logged


def test_a_line_of_progress_waits_for_no_rank_and_costs_no_rank(
    launched: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched.setattr(dist, "barrier", lambda *_: pytest.fail("a collective"))
    settings = SimpleNamespace(save=str(tmp_path / "saved"), world_size=2)
    launched.setattr(utils, "get_args", lambda: settings)
    launched.setattr(launch_sizes, "get_args", lambda: settings)
    append = REPLACED["megatron.training.utils.append_to_progress_log"](utils.append_to_progress_log)
    for rank in (1, 0):
        launched.setattr(dist, "get_rank", lambda rank=rank: rank)
        append("Starting job")
    assert (tmp_path / "saved" / "progress.txt").read_text().count("Starting job") == 1
    shutil.rmtree(tmp_path / "saved")
    (tmp_path / "saved").write_text("in the way")
    append("Saved checkpoint")
    assert "--log-progress: a line could not be written" in capsys.readouterr().out


def test_the_rank_that_writes_progress_is_the_only_one_that_reads_it(
    launched: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(iteration: int) -> None:
        raise FileNotFoundError(f"no progress.txt at {iteration}")

    appends = REPLACED["megatron.training.training.compute_throughputs_and_append_to_progress_log"](gone)
    for rank, told in ((1, ""), (0, "no progress.txt at 2")):
        launched.setattr(dist, "get_rank", lambda rank=rank: rank)
        appends(2)
        assert told in capsys.readouterr().out
