"""Ranks ordered tensor, pipeline, data (``--use-tp-pp-dp-mapping``) train as under plain Megatron, and may be lost.

The neighbour of a rank is then of another stage, so an engine that counts ranks in its own order would take layers,
samples or copies of the wrong one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.elastic_job import deviation_without_loss, elastic_job, largest_deviation
from tests.integration.kill_walk import DROPOUT, ROUNDING
from tests.integration.test_cpu_layouts import logs, losses
from tests.integration.test_engine_parity import NO_DROPOUT, Case, run_plain

ORDER = ("--use-tp-pp-dp-mapping",)
BACK = "delay:missing=1,count=0,point=between_steps,seconds=60"
"""Members wait at the next boundary until a lost rank asks to be admitted."""


@pytest.mark.slow
def test_losses_are_megatrons_and_lost_ranks_return(tmp_path: Path) -> None:
    case = Case("pp2dp2", (1, 2, 2), ORDER)
    run_plain(tmp_path, [case])
    faults = f"kill:rank=1,step=1,point=mid_backward;kill:rank=2,step=2,point=after_vote;{BACK}"
    flags = (*ORDER, *NO_DROPOUT, "--elastic-allow-inject", "--elastic-inject", faults)
    killed = elastic_job(tmp_path / "killed", 4, 1, 2, 5, *flags)
    assert killed.code == 0, killed.output[-6000:]
    assert largest_deviation(losses(logs(tmp_path, "pp2dp2")), killed.losses) < 2e-6
    lost = {(record.fields["stage"], record.fields["replica"]) for record in killed.of("loss")}
    assert lost == {(1, 0), (0, 1)}
    assert all(record.fields["lost_steps"] == 0 for record in killed.of("recovery"))
    assert set(re.findall(r"joined by (\d+)", killed.output)) == {"1", "2"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "stages", "more"),
    [
        (2, 2, ("--sequence-parallel",)),
        (1, 2, ("--num-virtual-stages-per-pipeline-rank", "2")),
        (1, 4, ("--elastic-schedule", "zero-bubble")),
        (1, 1, ()),
    ],
    ids=["tp2pp2dp2", "interleaved", "pp4dp2", "dp8"],
)
def test_losses_are_those_of_the_undisturbed_job(
    tmp_path: Path, tensor: int, stages: int, more: tuple[str, ...]
) -> None:
    flags = (*ORDER, *DROPOUT, *more, "--save", str(tmp_path / "saved"), "--save-interval", "3")
    whole = elastic_job(tmp_path / "whole", 8, tensor, stages, 6, *flags)
    faults = f"kill:rank=1,step=2,point=mid_backward;kill:rank=6,step=4,point=after_vote;{BACK}"
    killed = elastic_job(
        tmp_path / "killed", 8, tensor, stages, 6, *flags, "--elastic-allow-inject", "--elastic-inject", faults
    )
    assert deviation_without_loss(whole, killed) <= ROUNDING
    assert len({record.fields["lost_rank"] for record in killed.of("loss")}) == 2
