"""Activations spread over tensor-parallel ranks, and losses of experts by layer, while ranks are lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration.elastic_job import deviation_without_loss, elastic_job, largest_deviation
from tests.integration.kill_walk import DROPOUT, ROUNDING
from tests.integration.test_cpu_layouts import logs, losses
from tests.integration.test_engine_parity import EXPERTS, NO_DROPOUT, RECOMPUTE, Case, run_plain
from tests.integration.test_rank_orders import BACK

SPREAD = ("--distribute-saved-activations", *RECOMPUTE)


@pytest.mark.slow
def test_a_smaller_group_keeps_activations_whole(tmp_path: Path) -> None:
    """Three ranks of four cannot have equal parts of them."""
    flags = (*SPREAD, *NO_DROPOUT)
    run_plain(tmp_path, [Case("tp4", (4, 1, 1), SPREAD)])
    whole = elastic_job(tmp_path / "whole", 4, 4, 1, 5, *flags)
    faults = f"kill:rank=1,step=2,point=mid_backward;{BACK};kill:rank=3,rejoin=1,point=after_vote"
    killed = elastic_job(tmp_path / "killed", 4, 4, 1, 5, *flags, "--elastic-allow-inject", "--elastic-inject", faults)
    assert deviation_without_loss(whole, killed) <= ROUNDING
    assert largest_deviation(losses(logs(tmp_path, "tp4")), killed.losses) < 2e-6
    assert {record.fields["lost_rank"] for record in killed.of("loss")} == {1, 3}
    assert "joined by 1" in killed.output


def by_layer(folder: Path) -> dict[str, dict[int, float]]:
    """Name → step → value of each layer's loss, from TensorBoard's log."""
    (path,) = folder.glob("events.out.tfevents.*")
    log = EventAccumulator(str(path))
    log.Reload()
    names = [tag for tag in log.Tags()["scalars"] if re.match("moe/", tag)]
    return {tag: {event.step: event.value for event in log.Scalars(tag)} for tag in names}


@pytest.mark.slow
def test_losses_of_experts_by_layer_are_megatrons(tmp_path: Path) -> None:
    flags = (*EXPERTS, "--moe-per-layer-logging", "--error-injection-rate", "1000")
    run_plain(tmp_path, [Case("plain", (1, 2, 2), flags)])
    board = tmp_path / "board"
    faults = ("--elastic-allow-inject", "--elastic-inject", f"kill:rank=1,step=3,point=mid_backward;{BACK}")
    job = elastic_job(tmp_path / "killed", 4, 1, 2, 5, *flags, *NO_DROPOUT, *faults, "--tensorboard-dir", str(board))
    assert job.code == 0, job.output[-6000:]
    expected, found = by_layer(tmp_path / "plain-board"), by_layer(board)
    assert len(expected) == 8, "four layers, two losses"
    assert found.keys() == expected.keys()
    balancing = {name for name in expected if "load_balancing" in name}
    assert len(balancing) == 4, "Megatron's z-loss is that of one rank alone"
    for name in balancing:
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert "moe/" not in job.output


@pytest.mark.slow
def test_dropout_is_the_same_where_activations_are_gathered(tmp_path: Path) -> None:
    flags = (*SPREAD, *DROPOUT)
    spread = elastic_job(tmp_path / "spread", 4, 2, 2, 4, *flags)
    kept = elastic_job(tmp_path / "kept", 4, 2, 2, 4, *flags[1:])
    assert (spread.code, kept.code) == (0, 0), spread.output[-6000:]
    assert spread.committed == kept.committed
