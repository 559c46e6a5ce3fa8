"""Sums of gradients in exact mode: the same bits for any distribution of micro-batches, or one agreed refusal."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.engine.compute.buffers import Arena, HeldPart
from megatron.elastic.engine.compute.exact_gradients import ExactGradients, resolutions, whole_microbatches
from megatron.elastic.plan.dataflow import PlanError, microbatch_rows
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.planner import uniform_profile
from megatron.elastic.plan.policies.registry import choice_of, engine_policies, policy_named
from megatron.elastic.plan.topology import regular_topology, without_cells
from megatron.elastic.state.layout import UnitLayout
from tests.cluster.cluster import on_each_rank
from tests.cluster.fabric import ClusterFabric
from tests.cluster.model import TinyModel

UNITS = (0, 1)
PLACES = resolutions(1.0)[0]


def arena(model: TinyModel | None = None) -> Arena:
    model = model or TinyModel(len(UNITS), UNITS)
    specs = {unit: [one.spec for one in model.unit_parameters(unit)] for unit in UNITS}
    layouts = {(unit, 0): UnitLayout.build(unit, 0, specs[unit], 1024) for unit in UNITS}
    return Arena(model, layouts, HeldPart(UNITS, None, tuple(layouts)))


LENGTH = arena().gradients.numel()
PADDING = torch.ones(LENGTH, dtype=torch.bool)
for _start, _stop in arena().places():
    PADDING[_start:_stop] = False


def gradients_of(seed: int, count: int, spread: int) -> torch.Tensor:
    """Gradients ``[count, elements of the arena]`` of micro-batches, of magnitudes from ``2^-spread`` to 1."""
    made = torch.Generator().manual_seed(seed)
    magnitudes = 2.0 ** torch.randint(-spread, 1, (count, LENGTH), generator=made).float()
    return (torch.randn(count, LENGTH, generator=made) * magnitudes).masked_fill(PADDING, 0.0)


class Rank:
    """One rank's arena and sums, of a step of ``count`` micro-batches."""

    def __init__(self, count: int, places: int = PLACES, parts: int = 1) -> None:
        self.model = TinyModel(len(UNITS), UNITS)
        self.arena = arena(self.model)
        self.exact = ExactGradients(self.arena, count, parts=parts)
        self.exact.begin(places)

    def backward(self, gradient: torch.Tensor, units: tuple[int, ...] = UNITS) -> None:
        """Let autograd give each parameter of ``units`` its part of ``gradient`` (of the whole arena)."""
        for unit in units:
            for item in self.model.unit_parameters(unit):
                start, stop = self.arena.place_of(unit, item.spec.name)
                item.parameter.backward(gradient[start:stop].view(item.parameter.shape))

    def flagged(self) -> int:
        """Return what was wrong with a contribution, 0 if nothing was."""
        return self.exact._arithmetic.flags()

    def sums(self) -> torch.Tensor:
        """Return a copy of the integer sums."""
        return torch.cat([view.reshape(-1).clone() for views in self.exact.views().values() for view in views])


def reduced(ranks: list[Rank]) -> torch.Tensor:
    """Return the fp32 gradients of all ``ranks`` together, of which each one converts a part."""
    for rank in ranks:
        rank.exact.views()  # the end of a pass
    total = torch.stack([rank.exact.sums(0, LENGTH) for rank in ranks]).sum(0)
    result = torch.empty(LENGTH)
    for rank, part in zip(ranks, torch.arange(LENGTH).chunk(len(ranks)), strict=True):
        start, stop = int(part[0]), int(part[-1]) + 1
        rank.exact.sums(start, stop).copy_(total[start:stop])
        rank.exact.total(start, stop)
        result[start:stop] = rank.arena.gradients[start:stop]
    return result


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31), st.integers(1, 9), st.integers(0, 12), st.integers(1, 4), st.randoms(use_true_random=False)
)
def test_any_distribution_of_microbatches_over_ranks_gives_the_same_bits(
    seed: int, count: int, spread: int, size: int, random
) -> None:  # type: ignore[no-untyped-def]
    gradients = gradients_of(seed, count, spread)
    alone = Rank(count)
    for gradient in gradients:
        alone.backward(gradient)
    ranks = [Rank(count) for _ in range(size)]
    for number in random.sample(range(count), count):
        random.choice(ranks).backward(gradients[number])
    total = reduced([alone])
    assert torch.equal(total, reduced(ranks))
    exact = torch.tensor([math.fsum(column) for column in gradients.double().T.tolist()])
    bound = count * 2.0 ** -(PLACES + 1) + exact.abs() * 2.0**-23
    assert bool(((total - exact).abs() <= bound).all())


def test_a_gradient_is_added_when_autograd_has_it_and_stays_nowhere_else() -> None:
    """A gradient that stayed with its parameter would be counted again with the next micro-batch's."""
    rank, (gradient,) = Rank(2), gradients_of(1, 1, 0)
    rank.backward(gradient)
    once = rank.sums()
    assert once.any() and not rank.arena.gradients.any()
    assert all(item.parameter.grad is None for unit in UNITS for item in rank.model.unit_parameters(unit))
    rank.backward(gradient)
    assert torch.equal(rank.sums(), 2 * once)


def test_a_weight_gradient_computed_outside_of_autograd_counts_as_autograds_own() -> None:
    """Zero-bubble schedules compute it after the input gradients, from a queue."""
    whole, split, (gradient,) = Rank(1), Rank(1), gradients_of(2, 1, 0)
    whole.backward(gradient)
    split.backward(gradient, UNITS[:1])
    for item in split.model.unit_parameters(UNITS[1]):
        start, stop = split.arena.place_of(UNITS[1], item.spec.name)
        split.arena.accumulate(item.parameter, gradient[start:stop].view(item.parameter.shape))
    assert torch.equal(whole.sums(), split.sums())


def test_a_pass_has_nothing_of_the_pass_before() -> None:
    """Sums are not zeroed: a first contribution replaces what is there, and places without one are cleared."""
    first, second = gradients_of(3, 2, 4)
    used, fresh = Rank(1), Rank(1)
    used.backward(first)
    reduced([used])
    used.exact.begin(PLACES)
    for rank in (used, fresh):
        rank.backward(second, UNITS[1:])
    assert torch.equal(used.sums(), fresh.sums())
    assert torch.equal(reduced([used]), reduced([fresh]))
    used.exact.begin(PLACES)
    assert not used.sums().any()


def test_a_gradient_of_another_size_than_its_parameter_is_refused() -> None:
    """It would be added to the sums of the parameters behind it."""
    rank = Rank(1)
    for size in (1, LENGTH):
        with pytest.raises(ValueError, match=f"{size} gradients for elements"):
            rank.exact.contribute(UNITS[0], "weight", torch.ones(size))


def test_a_gradient_from_before_the_units_moved_is_refused() -> None:
    """Its place in the arena may be another parameter's by now."""
    rank, (gradient,) = Rank(1), gradients_of(4, 1, 0)
    rank.arena.hold(HeldPart(UNITS[:1], None, ((UNITS[0], 0),)))
    with pytest.raises(RuntimeError, match="outside of a pass"):
        rank.backward(gradient, UNITS[:1])
    rank.exact.begin(PLACES)
    rank.backward(gradient, UNITS[:1])
    assert rank.sums().numel() == sum(item.spec.numel for item in rank.model.unit_parameters(UNITS[0]))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([("weight", 0), ("bias", 1)]))
def test_each_use_of_a_weight_counts_by_itself_wherever_it_is_computed(seed: int, where: tuple[str, int]) -> None:
    """Both ends of tied embeddings on one rank, or on two."""
    (name, slot), unit = where, UNITS[1]
    together, apart = [Rank(1)], [Rank(1), Rank(1)]
    item = together[0].model.unit_parameters(unit)[slot]
    made = torch.Generator().manual_seed(seed)
    uses = [torch.randn(item.parameter.shape, generator=made) for _ in range(2)]
    for one, other in (together * 2, apart):
        one.model.unit_parameters(unit)[slot].parameter.backward(uses[0])
        other.exact.contribute(unit, name, uses[1])
    assert torch.equal(reduced(together), reduced(apart))
    assert torch.equal(together[0].arena.gradient_views()[unit][slot].bool(), (uses[0] + uses[1]).bool())
    others = [
        view for u in UNITS for at, view in enumerate(together[0].arena.gradient_views()[u]) if (u, at) != (unit, slot)
    ]
    assert not any(view.any() for view in others)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(-20, 40))
def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(seed: int, exponent: int) -> None:
    scale = 2.0**exponent
    plain, scaled = Rank(3), Rank(3, resolutions(scale)[0])
    for gradient in gradients_of(seed, 3, 4):
        plain.backward(gradient)
        scaled.backward(gradient * scale)
    assert torch.equal(reduced([plain]) * scale, reduced([scaled]))


def test_resolutions_become_coarser() -> None:
    assert resolutions(1.0) == [36, 28, 20, 12, 4, -4]
    assert resolutions(2.0**16) == [places - 16 for places in resolutions(1.0)] == resolutions(2.0**16 + 1)


class Agreed:
    """The outcome of a step on four ranks of which rank 2 contributes ``gradient`` and the others ones."""

    def __init__(self, gradient: float) -> None:
        self.passes: dict[int, list[bool]] = {}
        self.results: dict[int, float] = {}
        self._gradient = gradient
        on_each_rank(self._run)

    def _run(self, fabric: ClusterFabric) -> None:
        rank, places = Rank(4), resolutions(1.0)
        for number in places:
            rank.exact.begin(number)
            rank.backward(torch.full((LENGTH,), self._gradient if fabric.rank == 2 else 1.0))
            self.passes.setdefault(fabric.rank, []).append(rank.exact.agreed(fabric.world))
            if self.passes[fabric.rank][-1]:
                break
        torch.distributed.all_reduce(rank.exact.sums(0, LENGTH), group=fabric.world)
        rank.exact.total(0, LENGTH)
        self.results[fabric.rank] = float(rank.arena.gradients[7])


@pytest.mark.parametrize("parts", [1, 8])
def test_a_sum_over_a_cell_cannot_overflow_unnoticed(parts: int) -> None:
    """Its ranks may each have a part of a gradient as large as the largest one that is let pass."""
    count, places = 1024, 36
    largest = 0
    for power in range(25):
        rank = Rank(count, places, parts)
        rank.backward(torch.full((LENGTH,), 2.0**power))
        largest = largest if rank.flagged() else power
    assert 0 < largest < 24
    assert count * parts * 2 ** (largest + places) < 2**63


@pytest.mark.parametrize(
    ("gradient", "passes"), [(2.0, [True]), (2.0**20, [False, True]), (2.0**40, [False, False, False, False, True])]
)
def test_a_contribution_out_of_range_makes_all_ranks_compute_again_at_a_coarser_resolution(
    gradient: float, passes: list[bool]
) -> None:
    agreed = Agreed(gradient)
    assert [agreed.passes[rank] for rank in range(4)] == [passes] * 4
    assert agreed.results == dict.fromkeys(range(4), float(torch.tensor(gradient + 3.0)))


@pytest.mark.parametrize("gradient", [math.inf, -math.inf, math.nan])
def test_a_contribution_that_is_not_finite_makes_all_gradients_nan_for_the_vote_to_refuse(gradient: float) -> None:
    """No resolution would help, so none is tried."""
    agreed = Agreed(gradient)
    assert [agreed.passes[rank] for rank in range(4)] == [[True]] * 4
    assert len(agreed.results) == 4 and all(math.isnan(result) for result in agreed.results.values())


@pytest.mark.parametrize("before", [True, False], ids=["before the agreement", "after it"])
def test_an_injected_fault_is_a_contribution_that_is_not_finite(before: bool) -> None:
    """Its points lie on both sides of the agreement. After it, the rank's own blocks are enough for the vote."""
    spoilt: dict[int, bool] = {}

    def run(fabric: ClusterFabric) -> None:
        rank = Rank(4)
        rank.backward(gradients_of(fabric.rank, 1, 0)[0])
        if before and fabric.rank == 2:
            rank.exact.spoil()
        assert rank.exact.agreed(fabric.world)
        if not before and fabric.rank == 2:
            rank.exact.spoil()
        rank.exact.total(0, LENGTH)
        spoilt[fabric.rank] = bool(rank.arena.gradients.isnan().all())

    on_each_rank(run)
    assert spoilt == {rank: before or rank == 2 for rank in range(4)}


EVERY = [name for name in engine_policies() if policy_named(name).keeps_batch]


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "zero-bubble"])
@settings(max_examples=15, deadline=None)
@given(
    lost=st.sets(st.integers(0, 7), max_size=5),
    speeds=st.lists(st.integers(300_000, 1_500_000), min_size=8, max_size=8),
)
def test_every_piece_of_a_plan_is_one_whole_microbatch(
    policy: str, split: bool, lost: set[int], speeds: list[int]
) -> None:
    """Whatever cells are lost, and however slow the others are."""
    launched = regular_topology(4, 2, 4, micro_batch_size=3, waves=2)
    cells = tuple(replace(cell, speed_ppm=speeds[cell.id]) for cell in launched.cells)
    topology = without_cells(replace(launched, cells=cells), lost)
    try:
        plan = whole_microbatches(choice_of(policy_named(policy), split))(topology, uniform_profile(4))
    except PlanError as error:
        assert "--elastic-exact" not in str(error)  # a stage has no cell left
        return
    rows = {piece.rows for piece in plan.pieces}
    assert rows == {microbatch_rows(plan.grid, number) for number in range(8)}


def test_microbatches_have_the_same_rows_for_every_data_parallel_size() -> None:
    """So runs of different layouts add up the same contributions."""
    plans = [
        whole_microbatches(choice_of(policy_named("elaswave")))(
            regular_topology(replicas, stages, 4, micro_batch_size=3, waves=8 // replicas), uniform_profile(4)
        )
        for replicas, stages in ((1, 1), (2, 2), (4, 1), (2, 4))
    ]
    assert {len(plan.cells) for plan in plans} == {1, 4, 8}
    assert len({frozenset(piece.rows for piece in plan.pieces) for plan in plans}) == 1


@pytest.mark.parametrize(("first", "second"), [((0, 1), (2, 3, 4, 5)), ((0, 1, 2, 3), (4, 5))], ids=["cut", "mixed"])
def test_a_plan_that_cuts_or_mixes_microbatches_is_refused(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    topology = regular_topology(1, 1, 4, micro_batch_size=3, waves=2)
    choice = choice_of(policy_named("elaswave"))

    def other(topology: Topology, profile: Profile) -> Plan:
        plan = choice(topology, profile)
        pieces = tuple(replace(piece, rows=rows) for piece, rows in zip(plan.pieces, (first, second), strict=True))
        return replace(plan, pieces=pieces)

    with pytest.raises(PlanError, match="adds up whole micro-batches"):
        whole_microbatches(other)(topology, uniform_profile(4))
