"""A bit of a state block changes in memory: the wrong copy goes, the right one comes in its place (``certify.py``)."""

from __future__ import annotations

import pytest

from megatron.elastic.engine.failures import SilentCorruption
from megatron.elastic.engine.inject import InjectedFault
from megatron.elastic.engine.transaction import certify
from tests.cluster.checks import check
from tests.cluster.cluster import run


@pytest.mark.parametrize("copy", ["owner", "mirror"])
@pytest.mark.parametrize("tensor", ["master", "exp_avg"])
def test_a_changed_copy_is_made_anew(copy: str, tensor: str) -> None:
    """Among three copies two say which one is wrong."""
    fault = f"flip:rank=1,step=2,point=after_gather,copy={copy},tensor={tensor}"
    cluster = run(f"steps=8 seed=3 mirrors=2 verify_interval=1 {fault}")
    check(cluster, settled=True)
    moved = sum(process.engine.state_bytes for process in cluster.finished if process.engine is not None)
    assert moved > 0, "the copy came over a stream"


@pytest.mark.parametrize("rank", range(4))
def test_the_next_owner_computes_the_unit(rank: int) -> None:
    """With copies on every rank most right ones are with ranks of other stages, which cannot gather parameters."""
    fault = f"flip:rank={rank},step=2,point=after_gather,copy=owner"
    cluster = run(f"steps=6 seed={rank} mirrors=3 verify_interval=1 {fault}")
    check(cluster, settled=True)


@pytest.mark.parametrize("rank", range(3))
def test_no_other_rank_computes_the_unit(rank: int) -> None:
    """One pipeline: the right copies are all with other stages, and one comes back to where its unit is computed."""
    fault = f"flip:rank={rank},step=2,point=after_gather,copy=owner"
    cluster = run(f"pp3dp1 steps=6 seed={rank} mirrors=2 verify_interval=1 {fault}")
    check(cluster, settled=True)


def test_a_rank_without_such_a_copy_says_so() -> None:
    """With no mirrors there is none to change; a fault that was not carried out would look like one that was mended."""
    faults = "flip:rank=1,step=2,point=after_gather,copy=mirror"
    with pytest.raises(InjectedFault, match="rank 1 is the mirror of no block"):
        run(f"steps=3 mirrors=0 {faults}")


def test_a_changed_copy_and_a_loss_before_it_is_found() -> None:
    """The rank with the wrong copy is lost: what is left was never wrong."""
    faults = "flip:rank=1,step=2,point=after_gather,copy=owner kill:rank=1,step=3,point=before_reduce"
    check(run(f"steps=6 seed=1 mirrors=2 verify_interval=1 {faults}"))


def test_a_copy_of_a_wrong_copy_has_no_vote_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lost mirror's successor is made from the wrong mirror: both together do not outvote the right owner.

    Certificates compare part of what moved, so they may pass by this block.
    """
    monkeypatch.setattr(certify, "LOOKED_AT_BYTES", 0)
    flip = "flip:rank=0,step=2,point=after_gather,copy=mirror,tensor=exp_avg"
    kill = "kill:rank=2,step=3,point=before_reduce"
    with pytest.raises(SilentCorruption, match=r"corrupted at one of ranks \[0, 1, 3\]"):
        run(f"dp5 steps=12 seed=3 mirrors=2 verify_interval=6 back=never {flip} {kill}")


def test_a_new_mirror_has_a_vote_after_it_was_compared() -> None:
    """The copies that a loss has left to be made are compared; a bit that changes afterwards is mended."""
    flip = "flip:rank=0,step=6,point=after_gather,copy=mirror,tensor=exp_avg"
    kill = "kill:rank=2,step=3,point=before_reduce"
    check(run(f"dp5 steps=10 seed=3 mirrors=2 verify_interval=1 back=never {flip} {kill}"), settled=True)


def test_the_last_copy_that_differed_from_a_lost_owner_is_not_taken_for_right() -> None:
    """The mirror has found the difference; its owner is lost before the vote, so none compares the two."""
    flip = "flip:rank=1,step=2,point=after_gather,copy=mirror,tensor=exp_avg"
    kill = "kill:rank=0,step=3,point=before_vote"
    with pytest.raises(SilentCorruption, match=r"the last copy, at rank 1, had other contents than that of rank 0"):
        run(f"dp3 steps=8 seed=3 mirrors=1 verify_interval=1 back=never {flip} {kill}")


def test_a_mirror_that_had_a_difference_repaired_is_trusted() -> None:
    """The owner's copy was made anew; the loss of that rank afterwards ends nothing."""
    flip = "flip:rank=1,step=2,point=after_gather,copy=owner,tensor=exp_avg"
    kill = "kill:rank=1,step=6,point=before_vote"
    check(run(f"dp3 steps=9 seed=3 mirrors=2 verify_interval=1 back=never {flip} {kill}"))


def test_a_wrong_owner_that_is_lost_before_the_vote_leaves_right_copies() -> None:
    """The vote is taken again, and with it the finding of its mirrors, which agree with one another."""
    flip = "flip:rank=0,step=2,point=after_gather,copy=owner,tensor=exp_avg"
    kill = "kill:rank=0,step=3,point=before_vote"
    cluster = run(f"pp2dp2 steps=6 seed=0 mirrors=2 verify_interval=1 back=never {flip} {kill}")
    check(cluster)
