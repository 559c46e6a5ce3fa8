"""One rank writes TensorBoard's file; when it is lost another goes on in the same folder, and gives it back."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import global_vars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.elastic.control import env
from megatron.elastic.control.membership import RunFigures
from megatron.elastic.mcore.loop.reporter import Reporter
from tests.integration.standins import wandb

FIGURES = RunFigures(1, 1, 0, 1, 0, 12, 0.5, 2.5, 3.0, 0.75, (0.0, 0.5, 0.0, 0.0, 2.0, 0.0))


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Arguments of a rank that is not the last, without writers."""
    found = SimpleNamespace(
        rank=1,
        world_size=4,
        tensorboard_dir=str(tmp_path / "board"),
        tensorboard_queue_size=10,
        wandb_project="",
        wandb_exp_name="run",
        wandb_entity="",
        wandb_save_dir="",
        save=str(tmp_path),
    )
    for name in ("_GLOBAL_TENSORBOARD_WRITER", "_GLOBAL_WANDB_WRITER"):
        monkeypatch.setattr(global_vars, name, None)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", found)
    for name, value in {"RANK": "1", env.RUN_ID: "job", env.SECRET: "11" * 16}.items():
        monkeypatch.setenv(name, value)
    for name in (env.NEWCOMER, "WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    return found


def scalars(folder: str) -> list[tuple[int, float]]:
    board = EventAccumulator(folder).Reload()
    return [(event.step, event.value) for event in board.Scalars("loss")]


def test_the_reporter_goes_on_in_the_folder_and_its_lines_are_in_the_file_when_flushed(args: SimpleNamespace) -> None:
    first, second = Reporter(), Reporter()
    for steps, reporter in (((1, 2), first), ((3,), second)):
        assert global_vars.get_tensorboard_writer() is None
        reporter.hand_over(reports=True)
        opened = global_vars.get_tensorboard_writer()
        reporter.hand_over(reports=True)
        assert global_vars.get_tensorboard_writer() is opened, "it is open already"
        for step in steps:
            opened.add_scalar("loss", 1 / step, step)
        reporter.flush()
        assert scalars(args.tensorboard_dir)[-1] == (steps[-1], pytest.approx(1 / steps[-1]))
        reporter.hand_over(reports=False)
        assert global_vars.get_tensorboard_writer() is None
        reporter.flush()
    assert [step for step, _ in scalars(args.tensorboard_dir)] == [1, 2, 3]
    assert args.rank == 1, "the argument was another for a moment only"


def test_the_figures_of_the_run_are_in_the_event_file_and_in_the_run(
    args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_CALLS", str(tmp_path))
    args.wandb_project, args.tensorboard_log_interval = "project", 2
    reporter = Reporter()
    reporter.log(FIGURES, 2)
    reporter.hand_over(reports=True)
    for step, figures in ((3, FIGURES), (4, None), (6, replace(FIGURES, losses=2, goodput=float("nan"))), (8, FIGURES)):
        reporter.log(figures, step)
    reporter.flush()
    board = EventAccumulator(args.tensorboard_dir).Reload()
    found = {
        tag.removeprefix("elastic/"): [(event.step, event.value) for event in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
        if tag.startswith("elastic/")
    }
    causes = {"lost_edit_s", "lost_computed_again_s"}
    assert found.keys() == asdict(FIGURES).keys() - {"lost_by_cause_s"} | causes, "of the causes those that cost time"
    assert found["lost_computed_again_s"] == [(6, 2.0)]
    assert found["losses"] == [(6, 2.0), (8, 1.0)] and found["lost_s"] == [(6, 2.5)], "it has not changed"
    assert found["goodput"] == [(8, 0.75)], "an unknown share is not logged"
    reporter.hand_over(reports=False)
    calls = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    logged = {(call["key"], call["step"]): call["value"] for call in calls if call["call"] == "log"}
    assert logged["elastic/losses", 6] == 2.0 and logged["elastic/goodput", 8] == 0.75
    assert ("elastic/goodput", 6) not in logged and not any(step in (2, 3, 4) for _, step in logged)


class Wandb:
    """A ``wandb`` module that notes its runs, with the id that the environment names."""

    def __init__(self, fails: bool = False) -> None:
        self.runs: list[tuple[str, str]] = []
        self.finished = 0
        self.fails = fails

    def init(self, **_: object) -> None:
        if self.fails:
            raise RuntimeError("api key\nnot configured")
        self.runs.append((os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]))

    def finish(self) -> None:
        self.finished += 1


Replace = Callable[[Reporter], None]


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Replace:
    """Puts a reporter's row in place of Megatron's function, as the patch table does."""

    def put(reporter: Reporter) -> None:
        ((symbol, _, make),) = reporter.rows()
        assert symbol == "megatron.training.global_vars._set_wandb_writer"
        monkeypatch.setattr(global_vars, "_set_wandb_writer", make(global_vars._set_wandb_writer))

    return put


def test_every_reporter_resumes_the_one_run_of_the_job(
    args: SimpleNamespace, replaced: Replace, monkeypatch: pytest.MonkeyPatch
) -> None:
    args.wandb_project = "project"
    runs = []
    for secret in ("11" * 16, "11" * 16, "22" * 16):
        wandb: Any = Wandb()
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        monkeypatch.setenv(env.SECRET, secret)
        monkeypatch.delenv("WANDB_RUN_ID", raising=False)
        with monkeypatch.context() as patch:
            reporter = Reporter()
            ((_, _, make),) = reporter.rows()
            patch.setattr(global_vars, "_set_wandb_writer", make(global_vars._set_wandb_writer))
            reporter.hand_over(reports=True)
            reporter.hand_over(reports=False)
        assert wandb.finished == 1 and len(wandb.runs) == 1
        runs += wandb.runs
    assert runs[0] == runs[1] != runs[2], "the next job of this name is another run"
    assert runs[0][1] == "allow"


def test_a_newcomer_opens_no_run_before_it_is_admitted(
    args: SimpleNamespace, replaced: Replace, monkeypatch: pytest.MonkeyPatch
) -> None:
    args.wandb_project, args.rank = "project", args.world_size - 1
    wandb: Any = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv(env.NEWCOMER, "1")
    reporter = Reporter()
    replaced(reporter)
    global_vars._set_wandb_writer(args)
    assert wandb.runs == []
    reporter.hand_over(reports=True)
    assert len(wandb.runs) == 1


def test_a_run_that_cannot_be_opened_costs_one_line(
    args: SimpleNamespace, replaced: Replace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args.wandb_project = "project"
    monkeypatch.setitem(sys.modules, "wandb", Wandb(fails=True))  # type: ignore[arg-type]
    reporter = Reporter()
    replaced(reporter)
    reporter.hand_over(reports=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if "W&B" in line]
    assert len(lines) == 1 and "rank 1" in lines[0] and "api key not configured" in lines[0]
    assert "training goes on" in lines[0] and global_vars.get_tensorboard_writer() is not None
