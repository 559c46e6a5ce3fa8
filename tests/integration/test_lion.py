"""Lion under --elastic is Megatron's: the same losses, also when ranks are lost, and checkpoints that either resumes.

Plain Megatron's Lion is that of the package emerging-optimizers, which it is given here; --elastic needs none.
megatron-core 0.17.1 has no Lion (``tests/unit/mcore/test_optimizer_flags.py``): this runs with later releases.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from megatron.elastic.mcore.args.optimizers import LION_RELEASES
from megatron.elastic.mcore.patching.releases import in_range
from tests.integration.elastic_job import elastic_job, largest_deviation
from tests.integration.test_muon import QUIET, SHARED, check_either_resumes, ended, plain_losses, saved

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not in_range(version("megatron-core"), LION_RELEASES), reason="this megatron-core has no Lion"),
]
STEPS = 12
LION = ("--optimizer", "lion", "--lr", "1e-4", "--adam-beta1", "0.9", "--adam-beta2", "0.99")
FAULTS = "kill:rank=0,step=3,point=after_update;delay:rank=1,step=5-10,seconds=1.5"
KILLS = ("--elastic-allow-inject", "--elastic-inject", FAULTS)
LOST = ("--elastic-allow-inject", "--elastic-inject", "kill:rank=3,step=2,point=mid_forward")
ROUNDING = 2e-5
"""Largest deviation of a loss in fp32: where an update is about zero, gradients of another order of sums give it the
other sign, and a parameter moves by twice the learning rate."""


def test_losses_in_two_stages_cost_no_step_and_change_no_loss(tmp_path: Path) -> None:
    whole = ended(elastic_job(tmp_path / "whole", 4, 1, 2, STEPS, *LION))
    killed = ended(elastic_job(tmp_path / "killed", 4, 1, 2, STEPS, *LION, *KILLS))
    assert "--elastic-snapshot state" not in killed.output, "a mirror steps as its owner does"
    assert {record.fields["lost_rank"] for record in killed.of("loss")} == {0}
    assert any(record.fields["transition"] == "join" for record in killed.of("certificate")), "the rank came back"
    assert set(killed.committed) == set(whole.committed) == set(range(1, STEPS + 1))
    assert largest_deviation(whole.committed, killed.committed) < ROUNDING


def test_a_run_in_exact_mode_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    exact = (*LION, "--elastic-exact")
    whole = ended(elastic_job(tmp_path / "whole", 4, 1, 2, STEPS, *exact))
    killed = ended(elastic_job(tmp_path / "killed", 4, 1, 2, STEPS, *exact, *KILLS))
    assert {record.fields["lost_rank"] for record in killed.of("loss")} == {0}
    assert killed.committed == whole.committed and len(whole.committed) == STEPS


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_losses_are_plain_megatrons(tmp_path: Path, kind: str) -> None:
    flags = (*LION, *(("--bf16",) if kind == "bf16" else ()), "--train-iters", "6")
    plain, _ = plain_losses(tmp_path, 2, *flags)
    mine = ended(elastic_job(tmp_path / "events", 2, 1, 1, 0, *QUIET, *flags))
    assert len(plain) >= 5 and set(plain) == set(mine.losses)
    assert largest_deviation(plain, mine.losses) < (2e-4 if kind == "bf16" else ROUNDING)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_either_resumes_what_the_other_wrote(tmp_path: Path, kind: str) -> None:
    """In two stages and one; ours is written after a loss."""
    flags = (*QUIET, *LION, *(("--bf16",) if kind == "bf16" else ()), "--train-iters", "8")
    written = ended(elastic_job(tmp_path / "events", 4, 1, 2, 0, *flags, *saved(tmp_path / "ours"), *LOST))
    assert {record.fields["lost_rank"] for record in written.of("loss")} == {3}
    check_either_resumes(tmp_path, 2e-4 if kind == "bf16" else ROUNDING, *flags, stages=2)


def test_shared_experts_are_stepped_and_resumed_by_either(tmp_path: Path) -> None:
    flags = (*QUIET, *LION, *SHARED, "--bf16", "--train-iters", "8")
    ended(elastic_job(tmp_path / "events", 2, 1, 1, 0, *flags, *saved(tmp_path / "ours")))
    check_either_resumes(tmp_path, 2e-4, *flags)


def test_a_loss_changes_no_loss_where_ranks_share_each_layer(tmp_path: Path) -> None:
    """A tensor-parallel group goes on without its lost rank."""
    sizes, flags = (8, 2, 2, STEPS), (*QUIET, *LION, "--sequence-parallel")
    whole = ended(elastic_job(tmp_path / "whole", *sizes, *flags))
    killed = ended(elastic_job(tmp_path / "killed", *sizes, *flags, "--elastic-tensor", "live-on", *KILLS))
    assert {record.fields["lost_rank"] for record in killed.of("loss")} == {0}
    assert set(killed.committed) == set(range(1, STEPS + 1))
    assert largest_deviation(whole.committed, killed.committed) < ROUNDING
