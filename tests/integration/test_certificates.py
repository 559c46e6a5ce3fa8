"""Every class of bug a change of membership can have is found by the certificate of a running job, and stops it.

A rank is killed; on a survivor a bug strikes before the recovery's certificate is
taken (:mod:`tests.integration.broken_training`). The job must end, say what differs
and where, commit nothing more. Without a bug every transition passes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.broken_training import BUGS, SKIPPED_GATHER
from tests.integration.elastic_job import ROOT, JobResult, elastic_job

SCRIPT = ROOT / "tests" / "integration" / "broken_training.py"
BATCH = ("--global-batch-size", "12", "--hidden-dropout", "0", "--attention-dropout", "0")
KILL = (
    "--no-elastic-respawn",
    "--elastic-mirrors",
    "2",
    "--elastic-allow-inject",
    "--elastic-inject",
    "kill:rank=2,step=3,point=mid_forward",
)
FOUND = {
    "stale_moments": "differs in contents from the owner's",
    "swapped_blocks": "was made from other state or gradients than the owner's",
    "two_owners": "has owners [0, 1]",
    "no_owner": "has no owner",
    "missing_sample": "of the global batch are assigned to no rank",
    "doubled_sample": "is assigned to ranks [0, 1]",
    "stale_learning_rate": "record field rates",
    "stale_step_counter": "record field adam_step",
    "other_loss_scale": "record field loss_scale",
    "parameters_unlike_masters": "are not their masters",
    "reused_random_numbers": "random seed is",
}
QUICK = ("swapped_blocks",)


def broken(folder: Path, bug: str, transition: str, world: int, steps: int, *flags: str) -> JobResult:
    environment = {"BROKEN_BUG": bug, "BROKEN_TRANSITION": transition, "BROKEN_RANK": "1"}
    return elastic_job(folder, world, 1, 1, steps, *BATCH, *flags, script=SCRIPT, environment=environment)


def check_found(folder: Path, bug: str) -> None:
    result = broken(folder, bug, "recovery", 3, 6, *KILL)
    assert result.code == 5, f"exit code {result.code}, 5 is due\n{result.output[-4000:]}"
    failed = [record for record in result.of("certificate") if not record.fields["passed"]]
    assert {record.rank for record in failed} == {0, 1}, "both survivors come to the same end"
    assert len({record.fields["failures"][0] for record in failed}) == 1
    found = [text for record in failed for text in record.fields["failures"]]
    assert any(FOUND[bug] in text for text in found), found
    assert FOUND[bug] in result.output, "the finding is printed"
    assert set(result.committed) == {1, 2}, "nothing is committed on a state that failed its certificate"


def test_every_documented_bug_has_its_finding() -> None:
    assert set(FOUND) == set(BUGS)


@pytest.mark.parametrize("bug", QUICK)
def test_a_bug_in_a_recovery_stops_the_job_and_is_named(tmp_path: Path, bug: str) -> None:
    check_found(tmp_path, bug)


@pytest.mark.slow
@pytest.mark.parametrize("bug", sorted(set(BUGS) - set(QUICK)))
def test_any_bug_in_a_recovery_stops_the_job_and_is_named(tmp_path: Path, bug: str) -> None:
    check_found(tmp_path, bug)


@pytest.mark.slow
def test_a_skipped_all_gather_after_a_load_is_found(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    first = elastic_job(tmp_path / "first", 2, 1, 1, 2, *BATCH, "--save", saved, "--save-interval", "2")
    assert first.code == 0, first.output[-4000:]
    # The model is made from another seed, so that parameters nobody gathered are not those saved.
    flags = ("--load", saved, "--no-load-rng", "--seed", "8", "--override-opt-param-scheduler")
    result = broken(tmp_path / "second", SKIPPED_GATHER, "load", 2, 4, *flags)
    assert result.code == 5, result.output[-4000:]
    assert "are not their masters" in result.output


def test_transitions_of_a_sound_job_pass(tmp_path: Path) -> None:
    kill = ("--elastic-allow-inject", "--elastic-inject", "kill:rank=1,step=2,point=after_reduce")
    result = elastic_job(tmp_path, 2, 1, 1, 30, *BATCH, *kill)
    assert result.code == 0, result.output[-4000:]
    passed = result.of("certificate")
    assert all(record.fields["passed"] for record in passed)
    assert {record.fields["transition"] for record in passed} >= {"start", "recovery", "join", "migration"}
    for record in passed:
        assert record.fields["blocks"] > 0
    moved = [record for record in passed if record.fields["transition"] == "migration"]
    assert all(record.fields["contents"] > 0 for record in moved), "contents of what moved are compared"
    by_transition = {(record.generation, record.fields["transition"], record.fields["step"]) for record in passed}
    for key in by_transition:
        digests = {
            record.fields["digest"]
            for record in passed
            if (record.generation, record.fields["transition"], record.fields["step"]) == key
        }
        assert len(digests) == 1, "all ranks certified the same statements"
