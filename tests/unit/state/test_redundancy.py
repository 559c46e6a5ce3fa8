"""Missing mirrors are made anew at once: what a further loss costs before, meanwhile and afterwards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.state.layout import BlockKey, StateBlock
from megatron.elastic.state.ownership import Placement, Rules, Transition, UnitGroup, initial, promote_only
from megatron.elastic.state.redundancy import replenish, short_of_mirrors
from tests.unit.calls import calls_in


@dataclass(frozen=True)
class Job:
    """``stages`` of ``replicas`` ranks each; ``node`` ranks a failure domain; ``mirrors`` of each block."""

    stages: int
    replicas: int
    node: int
    mirrors: int
    blocks: int

    @property
    def ranks(self) -> range:
        return range(self.stages * self.replicas)

    def groups(self, living: list[int]) -> list[UnitGroup]:
        """One unit a stage, where anybody is left."""
        groups = []
        for stage in range(self.stages):
            blocks = tuple(StateBlock(stage, 0, i, 16 * i, 16 * (i + 1)) for i in range(self.blocks))
            holders = tuple(r for r in living if r // self.replicas == stage)
            groups += [UnitGroup(stage, 0, blocks, holders)] if holders else []
        return groups

    def rules(self, living: list[int]) -> Rules:
        return Rules(self.mirrors, 4, {rank: rank // self.node for rank in living})

    def without(self, placement: Placement, lost: list[int]) -> tuple[Placement, list[int], tuple[BlockKey, ...]]:
        """The placement, the living and the blocks that are lost after one more loss."""
        living = [rank for rank in self.ranks if rank not in lost]
        after = promote_only(placement, living, self.groups(living))
        return after.placement, living, after.lost


JOBS = st.builds(
    Job, st.integers(1, 3), st.integers(2, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 12)
).filter(lambda job: len(job.ranks) > job.mirrors)


@st.composite
def losses(draw) -> tuple[Job, list[int], list[int]]:
    """A job, and two losses of at most as many ranks as there are mirrors, that somebody survives."""
    job = draw(JOBS)
    some = st.permutations(list(job.ranks))
    order, first = draw(some), draw(st.integers(1, job.mirrors))
    second = draw(st.integers(1, job.mirrors))
    return job, order[:first], order[first : min(first + second, len(order) - 1)]


@settings(max_examples=150, deadline=None)
@given(losses())
def test_only_what_is_missing_is_added_and_then_no_mirrors_are_missing(case):
    job, lost, _ = case
    start = initial(job.groups(list(job.ranks)), job.rules(list(job.ranks)))
    before, living, gone = job.without(start, lost)
    assert not gone, "no more losses than mirrors"
    after, adds = replenish(before, job.groups(living), job.rules(living))
    assert not short_of_mirrors(after, job.mirrors, living)
    assert after == before.apply(adds) and {change.kind for change in adds} <= {"add"}
    assert all(after.owner(key) == before.owner(key) for key in after.copies), "no owner changes"
    due = min(job.mirrors, len(living) - 1)
    assert len(adds) == sum(max(0, due - len(copies.mirrors)) for copies in before.copies.values())
    assert all(change.source in before.copies[change.block].ranks for change in adds), "from a rank that has it"


@settings(max_examples=300, deadline=None)
@given(losses(), st.randoms(use_true_random=False))
def test_a_second_loss_costs_exactly_the_blocks_whose_copies_had_yet_to_come(case, random):
    """Whatever part of the copies has come: none, some or all. With all of them nothing is lost."""
    job, first, second = case
    start = initial(job.groups(list(job.ranks)), job.rules(list(job.ranks)))
    before, living, _ = job.without(start, first)
    _, adds = replenish(before, job.groups(living), job.rules(living))
    here: list[Transition] = random.sample(list(adds), random.randint(0, len(adds)))
    placement = before.apply(here)
    _, left, gone = job.without(placement, [*first, *second])
    assert left
    doomed = {key for key, copies in placement.copies.items() if set(copies.ranks) <= set(second)}
    assert set(gone) == doomed
    if len(here) == len(adds):
        assert not gone, "all copies were there"
    assert doomed <= {change.block for change in adds if change not in here}


@settings(max_examples=150, deadline=None)
@given(losses())
def test_a_copy_goes_to_another_node_if_it_can_and_there_to_a_rank_that_computes_the_unit(case):
    job, lost, _ = case
    start = initial(job.groups(list(job.ranks)), job.rules(list(job.ranks)))
    before, living, _ = job.without(start, lost)
    _, adds = replenish(before, job.groups(living), job.rules(living))
    held = before
    for change in adds:
        there = {rank // job.node for rank in held.copies[change.block].ranks}
        free = [rank for rank in living if rank not in held.copies[change.block].ranks]
        away = [rank for rank in free if rank // job.node not in there] or free
        home = [rank for rank in away if rank // job.replicas == change.block[0]]
        assert change.rank in (home or away)
        held = held.apply([change])


def test_all_survivors_send_and_receive_alike():
    """Eight ranks of one stage, one lost: nobody receives more than twice what it would take at least."""
    job = Job(stages=1, replicas=8, node=1, mirrors=1, blocks=56)
    start = initial(job.groups(list(job.ranks)), job.rules(list(job.ranks)))
    before, living, _ = job.without(start, [3])
    _, adds = replenish(before, job.groups(living), job.rules(living))
    received, sent = Counter(change.rank for change in adds), Counter(change.source for change in adds)
    assert len(adds) == 14
    assert max(received.values()) <= 3 and max(sent.values()) <= 4


def test_of_two_ranks_that_have_a_block_the_one_that_sends_least_sends_it():
    """Four ranks of one stage with two mirrors, one rank lost: two ranks have each block that is short of a copy."""
    job = Job(stages=1, replicas=4, node=1, mirrors=2, blocks=64)
    before, living, _ = job.without(initial(job.groups(list(job.ranks)), job.rules(list(job.ranks))), [3])
    _, adds = replenish(before, job.groups(living), job.rules(living))
    sent = Counter(change.source for change in adds)
    assert len(adds) == 48 and set(sent.values()) == {16}


def test_the_work_for_a_copy_does_not_grow_with_the_number_of_ranks():
    """A node of 8 ranks is lost, and all its blocks are short of a copy."""

    def calls_a_copy(stages: int) -> float:
        job, lost = Job(stages, 32, 8, 1, 512), list(range(8))
        after, living, gone = job.without(initial(job.groups(list(job.ranks)), job.rules(list(job.ranks))), lost)
        groups, rules = job.groups(living), job.rules(living)
        assert gone == ()
        missing = len(replenish(after, groups, rules)[1])
        once_a_block = 3 * len(after.copies)
        return (calls_in(lambda: replenish(after, groups, rules)) - once_a_block) / missing

    few, many = calls_a_copy(2), calls_a_copy(16)
    print(f"{few:.0f} calls a copy with 64 ranks, {many:.0f} with 512")
    assert many < 4 * few
