"""A job that ends or restarts names the checkpoint it has; one that cannot be written costs a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import global_vars

from megatron.elastic.config import ElasticConfig
from megatron.elastic.control.exits import ExitCode
from megatron.elastic.control.requests import Request
from megatron.elastic.engine.failures import ActionFailed
from megatron.elastic.mcore.checkpoint.save_points import Checkpoints, step_to_go_back_to
from megatron.elastic.state.record import Agreed

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize(
    ("written", "step"), [("120", 120), (" 7\n", 7), ("release", 0), ("12x", None), ("-3", None), ("", None)]
)
def test_the_tracker_names_the_step_to_go_back_to(tmp_path: Path, written: str, step: int | None) -> None:
    (tmp_path / TRACKER).write_text(written)
    assert step_to_go_back_to(loading(tmp_path)) == step


def loading(folder: Path | None, **flags: Any) -> SimpleNamespace:
    """Arguments of a job that loads from ``folder``."""
    load = None if folder is None else str(folder)
    unset = {"finetune": False, "ckpt_step": None, "pretrained_checkpoint": None}
    unset |= {"non_persistent_ckpt_type": None, "non_persistent_global_ckpt_dir": None}
    return SimpleNamespace(**{"load": load} | unset | flags)


def test_without_a_checkpoint_there_is_no_step_to_go_back_to(tmp_path: Path) -> None:
    assert step_to_go_back_to(loading(None)) is None
    assert step_to_go_back_to(loading(tmp_path)) is None


def test_flags_that_load_another_step_or_count_anew_are_honoured(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("120")
    assert step_to_go_back_to(loading(tmp_path, ckpt_step=40)) == 40
    assert step_to_go_back_to(loading(tmp_path, finetune=True)) == 0
    assert step_to_go_back_to(loading(tmp_path, finetune=True, pretrained_checkpoint="elsewhere")) == 120


@pytest.mark.parametrize(("persistent", "beside", "step"), [(None, 6, 6), (4, 6, 6), (8, 6, 8), (4, None, 4)])
def test_a_newer_non_persistent_checkpoint_is_the_one_to_go_back_to(
    tmp_path: Path, persistent: int | None, beside: int | None, step: int
) -> None:
    for folder, number in ((tmp_path, persistent), (tmp_path / "non_persistent", beside)):
        if number is not None:
            folder.mkdir(exist_ok=True)
            (folder / TRACKER).write_text(str(number))
    assert step_to_go_back_to(loading(tmp_path, non_persistent_ckpt_type="global")) == step
    assert step_to_go_back_to(loading(tmp_path, non_persistent_ckpt_type="global", finetune=True)) == 0
    assert step_to_go_back_to(loading(tmp_path)) == persistent


class Saves:
    """Saves of this rank by a script: each finish gives the next outcome, an error is raised."""

    def __init__(self, outcomes: list[str | Exception]) -> None:
        self.outcomes = outcomes
        self.interrupted = False

    def finish(self) -> str:
        outcome = self.outcomes.pop(0) if self.outcomes else "none"
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def cut_short(self) -> bool:
        return self.interrupted


class Job:
    """The checkpoints of a job, with the lines it says and the saves that it asks Megatron for."""

    def __init__(self, patch: pytest.MonkeyPatch, save: str | None, outcomes: list[str | Exception]) -> None:
        self.iteration = 0
        self.lines: list[str] = []
        self.saved: list[int] = []
        self.pending = SimpleNamespace(checkpoint=False)
        self.requests: list[Request] = []
        self.record = SimpleNamespace(agreed=Agreed())
        membership = SimpleNamespace(pending=lambda: self.pending, request=self.requests.append, fence=lambda: None)
        engine: Any = SimpleNamespace(record=self.record, agreement=SimpleNamespace(membership=membership))
        self.checkpoints = Checkpoints(ElasticConfig(), lambda: engine, self.lines.append)
        self.saves = Saves(outcomes)
        patch.setattr(self.checkpoints, "_saves", self.saves)
        patch.setattr(self.checkpoints, "_save_here", lambda: self.saved.append(self.iteration))
        patch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(save=save, save_interval=10))

    def boundary(self, iteration: int, *agreed: str) -> None:
        self.iteration, self.record.agreed = iteration, Agreed(save="save" in agreed, written="written" in agreed)
        self.checkpoints.at_boundary({"iteration": iteration})


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    return lambda save="/s", outcomes=(): Job(monkeypatch, save, list(outcomes))


def test_an_agreed_save_is_made_once_and_not_beside_a_regular_one(job: Callable[..., Job]) -> None:
    here = job()
    here.pending.checkpoint = True
    assert here.checkpoints._save_due()
    here.boundary(10, "save")
    assert here.saved == [], "Megatron saves at this boundary by itself"
    here.boundary(11, "save")
    assert here.saved == [11] and here.requests == [Request.CHECKPOINT]
    assert not here.checkpoints._save_due(), "the request has been carried out"
    here.saves.interrupted = True
    assert here.checkpoints._save_due(), "but the save was interrupted by a loss"
    here.pending.checkpoint, here.saves.interrupted = False, False
    assert not here.checkpoints._save_due()
    here.pending.checkpoint = True
    assert here.checkpoints._save_due(), "a further request"


def test_a_request_without_a_folder_is_one_line(job: Callable[..., Job]) -> None:
    here = job(save=None)
    here.boundary(3, "save")
    assert here.saved == [] and "--save is not given" in here.lines[0] and len(here.lines) == 1


def test_a_drain_begins_an_interrupted_save_again_until_it_is_done(job: Callable[..., Job]) -> None:
    here = job(outcomes=["again", "again", "done"])
    here.boundary(7)
    assert here.checkpoints.drain(7) == (ExitCode.DRAINED, "drained at iteration 7, saved to /s")
    assert here.saved == [7, 7, 7] and here.lines == []


def test_a_drain_that_cannot_save_says_so_in_its_status(job: Callable[..., Job]) -> None:
    here = job(outcomes=[ActionFailed("disk full")])
    here.boundary(7)
    code, why = here.checkpoints.drain(7)
    assert code == ExitCode.STATE_LOST and why == "drained at iteration 7, which could not be saved: disk full"
    assert "/s" in here.lines[0] and "the previous checkpoint is unchanged" in here.lines[0]
    nothing = job(save=None)
    nothing.boundary(9)
    assert nothing.checkpoints.drain(9) == (
        ExitCode.DRAINED,
        "drained at iteration 9, nothing saved: there is no --save",
    )


def test_a_later_save_that_succeeds_clears_the_failure(job: Callable[..., Job]) -> None:
    here = job(outcomes=[ActionFailed("disk full"), "none", "done"])
    for iteration, unsaved in ((11, "disk full"), (12, "disk full"), (13, "")):
        here.boundary(iteration, "written")
        assert here.checkpoints.unsaved == unsaved
    assert len(here.lines) == 1, "one line, once"


def test_nothing_is_saved_before_the_engine_exists() -> None:
    checkpoints = Checkpoints(ElasticConfig(), lambda: pytest.fail("not needed"), print)
    with pytest.raises(RuntimeError, match="before the elastic engine exists"):
        _ = checkpoints.saves
