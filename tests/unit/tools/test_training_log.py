"""What the quickstart reports is computed from log lines and events as its docstring says."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.elastic.observe.events import EventLog, RankLost, Record, Recovery, Step
from tools import loss_plot, training_log

LINE = (
    " [2026-01-02 03:04:05.678] iteration        7/      40 | consumed samples:          112 | "
    "elapsed time per iteration (ms): 250.5 | learning rate: 1.000000E-03 | global batch size:    16 | "
    "lm loss: {loss} | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | "
)


def records_of(*told: tuple[float, int, object], generation: int = 0) -> list[Record]:
    """Records from (wall, rank, event)."""
    return [Record(event.kind, wall, 0, rank, 0, generation, event, {}) for wall, rank, event in told]  # type: ignore[attr-defined, arg-type]


def step(number: int) -> Step:
    return Step(step=number, samples=(0, 16), seconds=0.0)


def lost(rank: int, at: int, incarnation: int = 0) -> RankLost:
    return RankLost(lost_rank=rank, lost_incarnation=incarnation, host="h", cause="signal SIGKILL", step=at)


@pytest.mark.parametrize("prefix", ["", "[default7]:", "[rank 7] "])
def test_an_iteration_line_is_read_whatever_its_prefix(prefix: str) -> None:
    found = training_log.parse_iteration(prefix + LINE.format(loss="6.543210E+00"))
    assert found == training_log.Iteration(7, 40, 6.54321, 0.2505)


@pytest.mark.parametrize(
    "line", ["", "iteration 3", "saved checkpoint from iteration       7 to /x", " > building | x: y"]
)
def test_other_lines_are_not_iterations(line: str) -> None:
    assert training_log.parse_iteration(line) is None


def test_a_step_logged_twice_must_say_the_same() -> None:
    assert training_log.losses_by_step([LINE.format(loss="1.5"), LINE.format(loss="1.5")]) == {7: 1.5}
    with pytest.raises(ValueError, match="step 7"):
        training_log.losses_by_step([LINE.format(loss="1.5"), LINE.format(loss="1.6")])


def test_a_loss_told_by_many_counts_once_and_a_second_life_again() -> None:
    records = records_of((5.0, 0, lost(3, 2)), (5.1, 1, lost(3, 2)), (9.0, 1, lost(3, 6, incarnation=1)))
    assert [(loss.rank, loss.incarnation, loss.wall) for loss in training_log.losses_of_ranks(records)] == [
        (3, 0, 5.0),
        (3, 1, 9.0),
    ]


def test_time_to_recover_is_the_gap_beyond_a_normal_step() -> None:
    walls = {1: 1.0, 2: 2.0, 3: 3.0, 4: 5.5, 5: 6.5, 6: 7.5}
    told = [(wall, 0, step(number)) for number, wall in walls.items()]
    # A slower rank's commit is the one that counts.
    records = records_of(*told, (2.25, 1, step(2)), (3.7, 0, lost(1, 4)))
    assert training_log.time_to_recover(records) == pytest.approx([1.5])


def test_time_to_recover_refuses_to_guess() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        training_log.time_to_recover(records_of((1.0, 0, step(1)), (1.5, 0, lost(1, 2)), (2.0, 0, step(2))))
    with pytest.raises(ValueError, match="no step was committed"):
        training_log.time_to_recover(records_of((1.0, 0, step(1)), (2.0, 0, step(2)), (2.5, 0, lost(1, 3))))


def test_lost_steps_are_summed_over_generations_not_over_ranks() -> None:
    recovery = Recovery(step=4, outcome="checkpoint", seconds={}, lost_steps=3)
    records = records_of((1.0, 0, recovery), (1.0, 1, recovery), generation=1)
    records += records_of((2.0, 0, Recovery(step=9, outcome="re-run", seconds={}, lost_steps=0)), generation=2)
    records += records_of((3.0, 0, Recovery(step=9, outcome="checkpoint", seconds={}, lost_steps=2)), generation=3)
    assert training_log.lost_steps(records) == 5


def test_deviation_needs_the_same_steps() -> None:
    assert training_log.deviation({1: 2.0, 2: 1.5}, {1: 2.0, 2: 1.0}) == 0.5
    with pytest.raises(ValueError, match=r"\[2\]"):
        training_log.deviation({1: 2.0}, {1: 2.0, 2: 1.0})


def test_a_run_is_read_from_its_folder_and_drawn(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("hello\n" + LINE.format(loss="2.5E+00") + "\n")
    log = EventLog(tmp_path / "events", rank=0)
    log.write(step(7))
    log.write(lost(1, 7))
    log.close()
    losses, records = training_log.read_run(tmp_path)
    assert losses == {7: 2.5}
    assert set(training_log.commits(records)) == {7}
    picture = tmp_path / "picture.png"
    loss_plot.draw(picture, losses, losses, {7: 0.5}, training_log.losses_of_ranks(records), "title")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
