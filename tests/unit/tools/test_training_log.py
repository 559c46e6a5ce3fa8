"""The quickstart's report is computed from log lines and events as its docstring says."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from megatron.elastic.observe.event_kinds import LogEvent, RankLostEvent, RecoveryEvent
from megatron.elastic.observe.events import EventLog, EventRecord
from tools import loss_plot, training_log
from tools.training_log import Iteration, Loss

LINE = (
    " [2026-01-02 03:04:05.678] iteration        7/      40 | consumed samples:          112 | "
    "elapsed time per iteration (ms): 250.5 | learning rate: 1.000000E-03 | global batch size:    16 | "
    "lm loss: {loss} | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | "
)


def records_of(*told: tuple[float, int, LogEvent], generation: int = 0) -> list[EventRecord]:
    """Records from (wall, rank, event)."""
    return [EventRecord(event.kind, wall, 0, rank, 0, generation, event, {}) for wall, rank, event in told]


def lost(rank: int, incarnation: int = 0) -> RankLostEvent:
    return RankLostEvent(lost_rank=rank, lost_incarnation=incarnation, host="h", cause="signal SIGKILL", step=0)


def run_of(*seconds: float) -> dict[int, Iteration]:
    """Steps 1, 2, … that took so long, one after the other from time 100."""
    walls = list(itertools.accumulate(seconds, initial=100.0))[1:]
    lines = zip(itertools.count(1), seconds, walls, strict=False)
    return {step: Iteration(step, len(seconds), 2.0, took, wall) for step, took, wall in lines}


@pytest.mark.parametrize("prefix", ["", "[default7]:", "[rank 7] "])
def test_an_iteration_line_is_read_whatever_its_prefix(prefix: str) -> None:
    found = training_log.parse_iteration(prefix + LINE.format(loss="6.543210E+00"))
    wall = datetime(2026, 1, 2, 3, 4, 5, 678000).timestamp()
    assert found == Iteration(7, 40, 6.54321, 0.2505, wall)


@pytest.mark.parametrize(
    "line", ["", "iteration 3", "saved checkpoint from iteration       7 to /x", " > building | x: y"]
)
def test_other_lines_are_not_iterations(line: str) -> None:
    assert training_log.parse_iteration(line) is None


def test_a_step_logged_twice_must_say_the_same() -> None:
    once = LINE.format(loss="1.5")
    assert training_log.iterations_of([once, "other", once])[7].loss == 1.5
    with pytest.raises(ValueError, match="step 7"):
        training_log.iterations_of([once, LINE.format(loss="1.6")])


def test_an_excerpt_is_two_steps_and_what_follows_them() -> None:
    ordinary = LINE.format(loss="1.5")
    lost, recovered = "[launch] lost rank 3 on h", "recovered at generation 2: y"
    told = [ordinary, "noise", ordinary, ordinary, lost, "warning: x", recovered]
    found = training_log.excerpt([*told, *[ordinary] * 20])
    assert len(found) == 12
    assert found[2:4] == [lost, recovered]
    assert all(
        line.startswith("iteration    7/  40 | ") and "lm loss:    1.5" in line for line in found[:2] + found[4:]
    )


def test_a_loss_told_by_many_counts_once_and_a_second_life_again() -> None:
    records = records_of((5.0, 0, lost(3)), (5.1, 1, lost(3)), (9.0, 1, lost(3, incarnation=1)))
    found = [(loss.rank, loss.incarnation, loss.wall) for loss in training_log.losses_of_ranks(records)]
    assert found == [(3, 0, 5.0), (3, 1, 9.0)]


def test_time_to_recover_is_what_a_step_took_beyond_a_normal_one() -> None:
    run = run_of(9.0, 1.0, 1.0, 3.5, 1.0, 1.25, 2.0)
    losses = [Loss(1, 0, "signal SIGKILL", 112.0), Loss(2, 0, "stopped", 113.0), Loss(1, 1, "hung", 118.0)]
    hit = training_log.steps_hit(run, losses)
    assert {step: [loss.rank for loss in told] for step, told in hit.items()} == {4: [1, 2], 7: [1]}
    assert training_log.time_to_recover(run, losses) == pytest.approx([2.5, 1.0])


def test_time_to_recover_refuses_to_guess() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        training_log.time_to_recover(run_of(1.0), [Loss(1, 0, "hung", 100.5)])
    with pytest.raises(ValueError, match="rank 3"):
        training_log.time_to_recover(run_of(1.0, 1.0), [Loss(3, 0, "hung", 102.5)])


def test_lost_steps_are_summed_over_generations_not_over_ranks() -> None:
    recovery = RecoveryEvent(step=4, outcome="checkpoint", seconds={}, lost_steps=3)
    records = records_of((1.0, 0, recovery), (1.0, 1, recovery), generation=1)
    records += records_of((2.0, 0, RecoveryEvent(step=9, outcome="re-run", seconds={}, lost_steps=0)), generation=2)
    records += records_of((3.0, 0, RecoveryEvent(step=9, outcome="checkpoint", seconds={}, lost_steps=2)), generation=3)
    assert training_log.lost_steps(records) == 5


def test_deviation_needs_the_same_steps() -> None:
    one, other = run_of(1.0, 1.0), run_of(1.0, 1.0)
    other[2] = replace(other[2], loss=1.0)
    assert training_log.deviation(one, other) == 1.0
    with pytest.raises(ValueError, match=r"\[2\]"):
        training_log.deviation(run_of(1.0), one)


def test_a_run_is_read_from_its_folder_and_drawn(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("hello\n" + LINE.format(loss="2.5E+00") + "\n")
    log = EventLog(tmp_path / "events", rank=0)
    log.write(lost(1))
    log.close()
    run, records = training_log.read_run(tmp_path)
    assert run[7].loss == 2.5
    losses = training_log.losses_of_ranks(records)
    assert [loss.rank for loss in losses] == [1]
    picture = tmp_path / "picture.png"
    loss_plot.draw(picture, run, run, {7: losses}, "title")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
