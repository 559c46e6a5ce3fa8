"""Links outlive the quorums of a manager that numbers its members anew."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.quorum import NO_SLOT, QuorumLinks, QuorumMember, agree
from tools.bench._common import Here, Ranks

ROOM = 6


@st.composite
def members(draw: st.DrawFn) -> list[QuorumMember]:
    lineage = st.sampled_from(["a", "b"])
    slot = st.integers(NO_SLOT, ROOM - 1)
    one = st.builds(QuorumMember, run_id=lineage, secret=st.just("s"), slot=slot, generation=st.integers(0, 9))
    return draw(st.lists(one, min_size=1, max_size=ROOM))


@given(members())
def test_slots_differ_and_a_member_of_the_lineage_keeps_its_own(present: list[QuorumMember]) -> None:
    found = agree(present, ROOM)
    assert len(set(found.slots)) == len(present) and set(found.slots) <= set(range(ROOM))
    assert found.generation > max(one.generation for one in present)
    held = [one.slot for one in present if one.slot != NO_SLOT and one.run_id == found.run_id]
    for slot in set(held):
        assert (
            found.slots[present.index(next(one for one in present if one.slot == slot and one.run_id == found.run_id))]
            == slot
        )


def test_more_members_than_slots_are_refused() -> None:
    with pytest.raises(CommError, match="raise slots="):
        agree([QuorumMember("a", "s", NO_SLOT, 0)] * 3, 2)


def renumbered(here: Here) -> list[tuple[float, str]]:
    """Quorums of processes 0 1 2, of 2 0 without 1, which is killed, and of 1 0 2 with its successor."""
    links, seen = QuorumLinks(slots=8), list[tuple[float, str]]()
    late = here.store().add(f"arrivals/{here.rank}", 1) > 1
    for number, order in enumerate([(0, 1, 2), (2, 0), (1, 0, 2)]):
        if here.rank not in order or (late and number < 2):
            continue
        store = dist.PrefixStore(f"quorum{number}", here.store())
        group = links.meet(store, order.index(here.rank), len(order), 20.0)
        first = torch.tensor([float(here.rank)])
        group.broadcast(first, 0).wait()
        total = torch.tensor([1.0 + here.rank])
        group.allreduce([total]).wait()
        assert (group.rank(), group.size()) == (order.index(here.rank), len(order))
        seen.append((float(first) + 10 * float(total), "failed" if group.failed() else "whole"))
        if number == 0:
            here.tell("met")
            if here.rank == 1:
                time.sleep(60)  # dies here
            with pytest.raises(CommError):
                group.allreduce([torch.ones(1)]).wait()
            assert group.failed()
    links.close()
    return seen


def test_members_meet_again_in_another_order_with_one_less_and_one_more() -> None:
    with Ranks(3, renumbered) as ranks:
        for rank in range(3):
            assert ranks.hear(rank) == "met"
        ranks.kill(1)
        ranks.start(1)
        found = ranks.results(range(3))
    three, two, again = (60.0, "whole"), (42.0, "whole"), (61.0, "whole")
    assert found == {0: [three, two, again], 1: [again], 2: [three, two, again]}


def interrupted(here: Here) -> None:
    links = QuorumLinks(slots=4)
    group = links.meet(dist.PrefixStore("one", here.store()), here.rank, 2, 20.0)
    if here.rank == 0:
        work = group.allreduce([torch.ones(1)])
        links.interrupt()
        with pytest.raises(CommError):
            work.wait()
        with pytest.raises(CommError):
            group.allreduce([torch.ones(1)]).wait()
    group = links.meet(dist.PrefixStore("two", here.store()), here.rank, 2, 20.0)
    total = torch.ones(1)
    group.allreduce([total]).wait()
    assert float(total) == 2.0
    links.close()


def test_an_interrupted_quorum_is_followed_by_one_that_works() -> None:
    with Ranks(2, interrupted) as ranks:
        ranks.results(range(2))
