"""Ranks on the stand-in accelerator die at every named point, return, move their state, and are replaced by spares.

The walk of :mod:`kill_walk`, on devices: losses are those of an undisturbed run on the same devices. Parameters,
activations and gradients lie in memory that the host cannot touch, and a device runs its work as late as is allowed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration import test_moving_state, test_spares
from tests.integration.elastic_job import deviation_without_loss, elastic_job
from tests.integration.kill_walk import DROPOUT, GROUPS, LAYOUTS, cases_of, flags_of, victim, walk
from tests.integration.test_standin import LOSING, ROUNDING_BF16, finished, lives, on_standin
from tests.standin.library import build

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job of a test runs on the devices."""
    build()
    for name, value in on_standin().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("layout", ["pp2dp2", "tp2dp2"])
def test_every_point_of_every_rank(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, layout: str, group: str
) -> None:
    cases = [case for point in GROUPS[group] for case in cases_of(LAYOUTS[layout], point)]
    shared = tmp_path_factory.getbasetemp() / "undisturbed on devices"
    walk(tmp_path, LAYOUTS[layout], cases, *flags_of(group, tmp_path), seconds=3600.0, shared=shared)


@pytest.mark.parametrize("devices", [1, 8])
def test_ranks_that_share_a_device_and_ranks_with_one_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    """Eight ranks: two stages of two replicas of two ranks."""
    monkeypatch.setenv("STANDIN_DEVICES", str(devices))
    layout = LAYOUTS["tp2pp2dp2"]
    wanted = (("mid_backward", 7), ("after_vote", 0), ("mid_gather", 3))
    cases = [case for point, rank in wanted for case in cases_of(layout, point) if victim(case) == rank]
    walk(tmp_path, layout, cases, seconds=600.0)


def test_in_bf16_a_loss_and_a_return_change_no_loss(tmp_path: Path) -> None:
    flags, steps = (*DROPOUT, "--bf16"), 6
    whole = elastic_job(tmp_path / "whole", 4, 1, 2, steps, *flags)
    killed = elastic_job(tmp_path / "killed", 4, 1, 2, steps, *flags, *LOSING)
    assert deviation_without_loss(whole, killed) <= ROUNDING_BF16
    assert (3, 1) in lives(killed)


def test_state_moves_between_devices_ranks_when_one_is_lost_and_when_it_is_back(tmp_path: Path) -> None:
    """With one mirror; copies are made anew beside steps, after the loss and after the return."""
    steps = 12
    script = "delay:missing=1,count=0,point=in_migration_begin,seconds=60;kill:rank=1,step=2,point=mid_forward"
    whole = elastic_job(tmp_path / "whole", 4, 1, 1, steps, *DROPOUT, "--lr-decay-iters", str(test_moving_state.STEPS))
    finished(whole)
    moved = test_moving_state.disturbed(tmp_path / "moved", script, steps=steps, mirrors=1)
    assert deviation_without_loss(whole, moved) <= 1e-5
    assert moved.of("migration") and (1, 1) in lives(moved)
    assert re.search(r"^mirrors complete with step 2: \d+ state blocks", moved.output, re.M)


@pytest.mark.parametrize("point", test_moving_state.POINTS)
def test_a_second_loss_during_a_migration(tmp_path: Path, point: str) -> None:
    whole = elastic_job(tmp_path / "whole", 4, 1, 1, test_moving_state.STEPS, *DROPOUT)
    test_moving_state.check_two_losses(tmp_path / "lost", whole, point, 2)


def test_a_spare_takes_a_lost_place(tmp_path: Path) -> None:
    test_spares.test_a_spare_takes_a_lost_place_at_once_and_the_lost_rank_is_the_next_spare(tmp_path)
