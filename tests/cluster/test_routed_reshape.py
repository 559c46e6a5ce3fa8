"""Layers with experts go from any tensor-, context-, expert-, pipeline- and data-parallel sizes to any others.

Losses and norms are those of the launch's sizes, no step is lost, and state keeps its bits. An expert is whole on a
rank at launch, or cut; other cells have it in the same parts, or a rank has several of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.control.requests import ParallelSizes
from megatron.elastic.engine.generation.expert_deal import ExpertDeal
from megatron.elastic.state.layout import BlockKey
from tests.cluster.checks import check
from tests.cluster.cluster import UNITS, Cluster, Program, RankProcess, run
from tests.cluster.cut_model import GROUPS
from tests.cluster.model import LENGTH
from tests.cluster.routed_model import EXPERTS
from tests.cluster.test_cells_of_any_size import engine_of, masters, move_to, parameters
from tests.cluster.test_reshape import ON_THE_WAY, RECOVERY, WHOLE_JOB, in_force, layout, lost_steps, told, wish

MICRO_BATCHES = 4


class Launch(NamedTuple):
    """Sizes of a launch, and the ranks with a part of each expert (Megatron's expert-tensor-parallel size)."""

    sizes: ParallelSizes
    cut: int = 1

    def __str__(self) -> str:
        return f"{self.sizes}, ETP {self.cut}"

    @property
    def program(self) -> Program:
        return Program(grid=True, experts=(self.sizes.experts, self.cut))

    @property
    def deal(self) -> ExpertDeal:
        return ExpertDeal(EXPERTS, self.sizes.experts, self.cut, self.sizes.cell)

    def fits(self, after: ParallelSizes) -> bool:
        """True if the job can go to these sizes."""
        few = after.data <= MICRO_BATCHES * self.sizes.data
        return few and not self.deal.over(after.experts, after.cell).refusal(after.data)


def all_sizes(ranks: int) -> list[ParallelSizes]:
    """All sizes of that many ranks that the model's units, positions and experts allow."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    found = [
        ParallelSizes(tensor, pipeline, ranks // (tensor * context * pipeline), context, experts)
        for tensor in divisors
        for context in divisors
        for pipeline in divisors
        for experts in (1, 2, 4)
        if ranks % (tensor * context * pipeline) == 0 and (context == 1 or LENGTH % (2 * context) == 0)
    ]
    return [one for one in found if one.ranks == ranks and one.pipeline <= UNITS]


def launches(ranks: int) -> list[Launch]:
    """All launches of that many ranks whose ranks share experts."""
    found = [
        Launch(sizes, cut)
        for sizes in all_sizes(ranks)
        for cut in range(1, sizes.tensor + 1)
        if sizes.experts > 1 and sizes.tensor % cut == 0 and GROUPS % sizes.tensor == 0
    ]
    return [one for one in found if not one.deal.refusal(one.sizes.data)]


def ways(ranks: int) -> list[tuple[Launch, ParallelSizes]]:
    """Every change of tensor- or context-parallel size of that many ranks that fits."""
    return [
        (launch, after)
        for launch in launches(ranks)
        for after in all_sizes(ranks)
        if launch.fits(after) and after[::3] != launch.sizes[::3]
    ]


def drawn(ranks: int, number: int, each_time: int) -> list[object]:
    """``number`` of :func:`ways`, the same in each run; all but the first ``each_time`` are slow."""
    chosen = random.Random(19).sample(ways(ranks), number)
    return [
        pytest.param(*way, marks=() if at < each_time else pytest.mark.slow, id=f"{way[0]} to {way[1]}")
        for at, way in enumerate(chosen)
    ]


def goes(launch: Launch, words: str, steps: int = 9) -> Cluster:
    """The cluster after a run with these words, in which no step was lost and losses are the launch's."""
    at = layout(launch.sizes)
    cluster = run(f"{at} steps={steps} micro_batches={MICRO_BATCHES} mirrors=2 {words}", launch.program)
    check(cluster)
    assert lost_steps(cluster) == 0
    return cluster


@pytest.mark.parametrize(("launch", "after"), [*drawn(4, 24, 2), *drawn(8, 24, 1)])
def test_sizes_into_others(launch: Launch, after: ParallelSizes) -> None:
    """The sizes come into force in one step, and every crew has all experts."""
    cluster = goes(launch, wish(after, 2))
    check(cluster, settled=True)
    assert in_force(cluster) == after and told(cluster)[0] == "in force"
    for process in cluster.finished:
        place = engine_of(process).view.assignment.place(process.rank)
        assert place is not None and place.crew is not None
        assert sorted({expert for mine in place.crew.experts for expert in mine}) == list(range(EXPERTS))


TO_TWO = Launch(ParallelSizes(1, 1, 4, 1, 2)), ParallelSizes(2, 1, 2, 1, 2)
TO_ONE = Launch(ParallelSizes(2, 1, 2, 1, 2), 2), ParallelSizes(1, 1, 2, 2, 2)
"""An expert of two parts at launch, which the ranks of a cell then have as parts of the sequence."""
WHOLE = Launch(ParallelSizes(2, 1, 2, 1, 2), 2), ParallelSizes(1, 2, 2, 1, 2)
"""An expert of two parts at launch, both of which one rank then has."""
KILLS = [
    pytest.param(way, point, rank, marks=() if (number, rank) == (1, 1) else pytest.mark.slow)
    for number, point in enumerate((*ON_THE_WAY, *WHOLE_JOB))
    for rank in range(4)
    for way in ((TO_TWO, TO_ONE, WHOLE)[(number + rank) % 3],)
]


@pytest.mark.parametrize(("way", "point", "rank"), KILLS)
def test_a_loss_on_the_way(way: tuple[Launch, ParallelSizes], point: str, rank: int) -> None:
    where = "" if point in ON_THE_WAY else ",step=5"
    launch, after = way
    cluster = goes(launch, f"seed={rank} kill:rank={rank},point={point}{where} {wish(after, 2)}", steps=16)
    assert in_force(cluster) == after and told(cluster)[0] == "in force"
    assert all(not engine_of(process).view.assignment.rehomed for process in cluster.finished)


@pytest.mark.slow
@pytest.mark.parametrize("point", RECOVERY[1:])
@pytest.mark.parametrize("way", [TO_TWO, WHOLE])
def test_a_second_loss_in_the_recovery_from_a_loss_on_the_way(way: tuple[Launch, ParallelSizes], point: str) -> None:
    """Of ranks of different cells, whose crews have other homes until they are back."""
    launch, after = way
    kills = f"kill:rank=0,point=in_migration_finish kill:rank=3,missing=1,point={point}"
    cluster = goes(launch, f"{kills} {wish(after, 2)}", steps=16)
    assert in_force(cluster) == after


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("way", [TO_TWO, WHOLE])
def test_the_sizes_stay_in_force_after_a_loss(way: tuple[Launch, ParallelSizes], rank: int) -> None:
    launch, after = way
    cluster = goes(launch, f"{wish(after, 1)} kill:rank={rank},step=11,point=mid_backward", steps=18)
    assert in_force(cluster) == after
    assert all(not engine_of(process).view.plan.parked for process in cluster.finished)


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("2|1|2|1|3", "EP 3 does not divide 4 experts"),
        pytest.param("4|1|1|1|8", "EP 8 does not divide 4 experts", marks=pytest.mark.slow),
        pytest.param("2|2|1|1|4", "EP 4 takes a number of replicas that is a multiple of 2", marks=pytest.mark.slow),
        pytest.param("1|1|1|4|2", "CP 4 takes a length that is a multiple of 8, and it is 4", marks=pytest.mark.slow),
    ],
)
def test_sizes_that_cannot_be_are_refused_in_one_line(to: str, why: str) -> None:
    cluster = goes(TO_TWO[0], f"reshape:to={to},step=1")
    (line,) = [line for line in cluster.finished[0].notices if "refused" in line]
    assert line.endswith(why)
    assert in_force(cluster) == TO_TWO[0].sizes


def fitting(launch: Launch, sizes: Sequence[ParallelSizes]) -> list[ParallelSizes]:
    return [one for one in sizes if launch.fits(one)]


@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from(launches(4)),
    st.lists(st.sampled_from(all_sizes(4)), min_size=2, max_size=4),
    st.integers(0, 1000),
)
def test_state_is_bitwise_unchanged_by_changes_of_sizes_without_steps_between(
    launch: Launch, through: list[ParallelSizes], seed: int
) -> None:
    """Masters and moments of all blocks, and the parameters that ranks compute with."""
    wanted, held = dict[BlockKey, torch.Tensor](), dict[BlockKey, torch.Tensor]()

    def fenced(rank: RankProcess, step: int) -> None:
        if step != 2:
            return
        engine = engine_of(rank)
        before, values = masters(engine), parameters(engine)
        first, living = engine.view.assignment, engine.view.living
        for sizes in (*fitting(launch, through), first.base.sizes):
            move_to(engine, engine.views.reshaped(living, sizes))
        assert engine.view.assignment == first
        assert torch.equal(parameters(engine), values), f"rank {rank.rank}: other parameters"
        wanted.update(before)
        held.update(masters(engine))

    words = f"{layout(launch.sizes)} steps=4 seed={seed} micro_batches={MICRO_BATCHES} evaluate=0"
    check(run(words, Program(grid=True, experts=launch.program.experts, fenced=fenced)))
    assert wanted.keys() == held.keys() and wanted
    assert all(torch.equal(wanted[key], held[key]) for key in wanted), "masters or moments differ"


def test_of_every_launch_some_other_sizes_fit() -> None:
    """The draws above are from all launches of four and eight ranks."""
    for ranks in (4, 8):
        assert {launch for launch, _ in ways(ranks)} == set(launches(ranks))
