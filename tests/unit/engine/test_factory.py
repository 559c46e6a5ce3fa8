"""Views and migrations follow from a decision: alike on every rank, complete, and refused where no rank can compute."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.elastic.comm.address import Address
from megatron.elastic.config import ElasticConfig
from megatron.elastic.control.membership import Decision, each_once
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.cell_sizes import CellSizes
from megatron.elastic.engine.generation.configuration import Configuration
from megatron.elastic.engine.generation.domains import failure_domains, placement_rules
from megatron.elastic.engine.generation.factory import StageGone, ViewFactory
from megatron.elastic.engine.generation.hardware import Hardware
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.migration import Migration
from megatron.elastic.engine.generation.repartition import better_assignment
from megatron.elastic.engine.generation.report import Report, newcomers, reports_of
from megatron.elastic.engine.generation.shape import CellCut
from megatron.elastic.engine.generation.view import Relays, View, unit_groups
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Grid, Plan, Profile, Topology
from megatron.elastic.plan.planner import uniform_profile
from megatron.elastic.plan.policies.registry import choice_of, policy_named
from megatron.elastic.plan.schedule.validate import memory_peaks, validate_plan
from megatron.elastic.state.layout import UnitLayout
from megatron.elastic.state.ownership import initial
from megatron.elastic.state.placement import Transition, promote_only
from megatron.elastic.state.protocol import Holdings
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord
from tests.cluster.fabric import ClusterFabric, Wire
from tests.cluster.model import TinyModel
from tests.cluster.scheduler import Scheduler

UNITS, STAGES, REPLICAS = 4, 2, 2
RANKS = range(STAGES * REPLICAS)
"""Ranks 0 and 1 compute the first stage, 2 and 3 the second."""
RECORD = replace(
    StepRecord.initial(Hyper(ConstantSchedule((Rate(0.01, 0.01),)))), version=3, gradient=GradientKey(2, 1)
)
"""Of a vote in generation 1."""
MEMORY = 1 << 40


def topology(extra: int = 0) -> LaunchTopology:
    cuts = [UNITS * stage // STAGES for stage in range(STAGES + 1)]
    return LaunchTopology(1, STAGES, REPLICAS, tuple(pairwise(cuts)), Grid(8, 1, REPLICAS), extra=extra)


def layouts() -> dict[tuple[int, int], UnitLayout]:
    model = TinyModel(UNITS, range(UNITS))
    return {
        (unit, 0): UnitLayout.build(unit, 0, [one.spec for one in model.unit_parameters(unit)], 1024)
        for unit in range(UNITS)
    }


@contextmanager
def factories(extra: int = 0, policy: str = "elaswave", **config: object) -> Iterator[dict[int, ViewFactory]]:
    """One factory a rank."""
    wire, launch, chosen = Wire(Scheduler(0)), topology(extra), policy_named(policy)
    settings = ElasticConfig(block_bytes=1024, **config)  # type: ignore[arg-type]
    assignment = Assignment.at_launch(launch)
    fabrics = [ClusterFabric(wire, rank, len(RANKS) + extra, 0, f"host{rank}") for rank in range(len(RANKS) + extra)]
    try:
        yield {
            fabric.rank: ViewFactory(
                fabric,
                launch,
                settings,
                layouts(),
                Arena(TinyModel(UNITS, assignment.units_of(fabric.rank)), layouts(), assignment.held_by(fabric.rank)),
                choice_of(chosen),
                chosen.moves_units,
                uniform_profile(UNITS),
                Hardware(MEMORY, 10**9),
                CellSizes.of(lambda tensor, parts: None, CellCut(1)),
            )
            for fabric in fabrics
        }
    finally:
        for fabric in fabrics:
            fabric.close()


def decision(members: Collection[int], joined: Collection[int] = (), **fields: object) -> Decision:
    """A decision of generation 2; ``joined`` have no report."""
    report = {
        rank: Report(Holdings(3, 3, (), (RECORD,)), phase=3, done=False, parameters=3, held_for="").to_text()
        for rank in sorted(members)
        if rank not in joined
    }
    where = {rank: Address(rank, int(rank in joined), f"host{rank}") for rank in sorted(members)}
    texts, text_of = each_once(report)
    return Decision(2, where, "loss", texts=texts, text_of=text_of, **fields)  # type: ignore[arg-type]


def configuration(factory: ViewFactory, members: Collection[int] = RANKS) -> Configuration:
    """The configuration of the launch, after the loss of all ranks but ``members``."""
    start = decision(RANKS)
    assignment = Assignment.at_launch(factory.launch_topology)
    rules = placement_rules(factory.config, failure_domains(start))
    placement = initial(unit_groups(assignment, factory.layouts, RANKS), rules)
    groups = unit_groups(assignment, factory.layouts, members)
    return Configuration(promote_only(placement, members, groups).placement, assignment)


def view_of(factory: ViewFactory, decided: Decision, record: StepRecord | None = None) -> View:
    """Return the view of ``decided`` under the launch's configuration without the copies of ranks that were lost."""
    survivors = [rank for rank in decided.members if rank not in newcomers(decided)]
    held = configuration(factory, survivors)
    return factory.build_view(decided, held, record or RECORD, held.assignment, reports_of(decided))


SURVIVORS = st.sets(st.sampled_from(RANKS), min_size=1)


@pytest.mark.parametrize("lost", [0, 1])
def test_after_a_loss_a_cell_has_no_more_samples_in_flight_than_its_memory_holds(lost: int) -> None:
    """The peer of a lost cell computes for two pipelines. Where their samples fit together, it takes more at a time."""
    with factories(mirrors=1) as made:
        factory = made[min(set(RANKS) - {lost})]
        launched = view_of(factory, decision(RANKS)).plan
        largest = max(memory_peaks(launched, factory.profile).values())
        for memory, fits in ((MEMORY, False), (largest, True), (1, True)):
            limited = replace(factory, hardware=Hardware(memory, 10**9))
            plan = view_of(limited, decision(set(RANKS) - {lost})).plan
            validate_plan(plan, UNITS)
            assert (max(memory_peaks(plan, factory.profile).values()) <= largest) == fits
            assert view_of(limited, decision(RANKS)).plan == launched


def test_a_loss_ends_no_job_by_an_estimate_of_memory() -> None:
    """By the profile no plan fits the memory: the fastest is taken all the same."""
    with factories(mirrors=1) as made:
        factory = made[1]

        def none_fits(topology: Topology, profile: Profile) -> Plan:
            if any(cell.memory_bytes < 1 << 60 for cell in topology.cells) and len(topology.cells) < len(RANKS):
                raise PlanError("nothing fits")
            return factory.choose(topology, profile)

        limited = replace(factory, choose=none_fits, hardware=Hardware(1, 10**9))
        survivors = decision(set(RANKS) - {0})
        assert view_of(limited, survivors).plan == view_of(factory, survivors).plan


@settings(max_examples=15, deadline=None)
@given(SURVIVORS)
def test_all_ranks_have_one_plan_and_each_block_has_one_owner(members: set[int]) -> None:
    """Or all refuse, where a stage has no rank left, and name the ranks that would complete it."""
    decided = decision(members)
    stages = {rank // REPLICAS for rank in members}
    with factories(mirrors=2) as made:
        if len(stages) < STAGES:
            for rank in members:
                with pytest.raises(StageGone) as gone:
                    view_of(made[rank], decided)
                assert {missing // REPLICAS for missing in gone.value.missing} == set(range(STAGES)) - stages
                assert "resume from the last checkpoint" in str(gone.value.final("none is started again"))
            return
        views = {rank: view_of(made[rank], decided) for rank in members}
    placement = next(iter(views.values())).placement
    assert len({(view.plan.digest, view.configuration.digest, view.living) for view in views.values()}) == 1
    assert sorted(block.key for view in views.values() for block in view.owned) == sorted(placement.copies)
    assert sum(len(view.mirrored) for view in views.values()) == sum(len(c.mirrors) for c in placement.copies.values())
    for rank, view in views.items():
        assert view.rank == rank and view.cell is not None and rank in view.cell.ranks
        for peer, blocks in view.routes.outgoing.items():
            assert views[peer].routes.incoming[rank] == blocks, "what one sends the other expects"
    assert {row for piece in view.plan.pieces for row in piece.rows} == set(range(8)), "no sample is left out"


def test_a_rank_that_joined_is_unproven_and_its_cell_not_measured() -> None:
    """The record's speed of rank 3's cell was that of the process that was lost."""
    launch = topology()
    slow = {launch.cell_of(rank).id: 700_000 for rank in (1, 3)}
    record = replace(RECORD, speeds=tuple(sorted(slow.items())))
    with factories() as made:
        view = view_of(made[0], decision(RANKS, joined=(3,)), record)
    assert view.unproven == {3}
    assert dict(view.speeds()) == {launch.cell_of(1).id: 700_000}


def test_a_cell_of_other_ranks_than_were_measured_is_not_taken_for_slow() -> None:
    """Its slow rank may be the one that it has lost. A cell that has its ranks keeps its speed."""
    record = replace(RECORD, speeds=tuple((cell, 600_000) for cell in range(len(RANKS))))
    with factories() as made:
        held = configuration(made[0])
        exchanged = ((0, held.assignment.cells[1].ranks), (1, held.assignment.cells[0].ranks))
        formed = replace(held, assignment=replace(held.assignment, formed=exchanged))
        loss = made[0].build_view(decision(RANKS), formed, record, held.assignment, {})
        again = made[0].build_view(decision(RANKS), formed, record, formed.assignment, {})
        moved = made[0].with_configuration(
            made[0].build_view(decision(RANKS), held, record, held.assignment, {}), formed
        )
    assert dict(loss.speeds()) == dict(moved.speeds()) == {2: 600_000, 3: 600_000}
    assert set(dict(again.speeds())) == set(range(len(RANKS)))


def test_a_known_assignment_is_the_object_that_has_worked_out_its_tables() -> None:
    """After a loss that leaves the cut as it is, and when the last cell that was formed anew is whole again."""
    with factories() as made:
        launched = Assignment.at_launch(made[0].launch_topology)
        assert made[0].taken_over(launched, decision(set(RANKS) - {3})) is launched
        lives_on = replace(made[0], lives_on=True)
        exchanged = ((0, launched.cells[1].ranks), (1, launched.cells[0].ranks))
        whole = [
            lives_on.taken_over(replace(launched, formed=formed), decision(RANKS)) for formed in (exchanged, exchanged)
        ]
        assert whole[0] is whole[1] and whole[0] == launched


def test_a_new_plan_for_measured_speeds_keeps_everything_else() -> None:
    with factories() as made:
        before = view_of(made[1], decision(RANKS))
        after = made[1].replan(before, replace(RECORD, speeds=((0, 500_000),)))
        assert after.plan.digest != before.plan.digest and dict(after.speeds()) == {0: 500_000}
        assert (after.configuration, after.spans, after.owned) == (before.configuration, before.spans, before.owned)
        assert made[1].replan(after, RECORD).plan.digest == before.plan.digest


def test_ranks_that_others_need_are_indispensable_and_the_reason_is_told() -> None:
    with factories() as made:
        view = view_of(made[0], decision(RANKS))
        assert [made[0].indispensable(view, [rank]) for rank in RANKS] == [""] * 4
        assert made[0].indispensable(view, [0, 3]) == ""
        assert "no living holder" in made[0].indispensable(view, [0, 1])


# -- taking over the places of lost ranks ------------------------------------------------------


def test_a_spare_takes_a_lost_ranks_place() -> None:
    with factories(extra=1) as made:
        launched = Assignment.at_launch(made[0].launch_topology)
        taken = made[0].taken_over(launched, decision([0, 1, 3, 4], joined=[4]))
        assert taken.units_of(4) == launched.units_of(2) and taken.units_of(2) == ()


def test_a_stage_is_recut_only_if_none_of_its_ranks_will_return() -> None:
    with factories() as made:
        launched = Assignment.at_launch(made[0].launch_topology)
        assert made[0].taken_over(launched, decision([0, 1], returning=(2,))) == launched
        recut = made[0].taken_over(launched, decision([0, 1]))
        assert {unit for rank in (0, 1) for unit in recut.units_of(rank)} == set(range(UNITS))
        fixed = replace(made[0], moves_units=False)
        assert fixed.taken_over(launched, decision([0, 1])) == launched
        small = replace(made[0], hardware=Hardware(0, 10**9))
        assert small.taken_over(launched, decision([0, 1])) == launched, "no cut fits the memory"


# -- migrations --------------------------------------------------------------------------------


def added(migration: Migration) -> set[tuple[int, int, tuple[int, int, int]]]:
    """(source, destination, block) of all copies that are added."""
    return {(c.source, c.rank, c.block) for c in migration.changes if c.kind == "add"}


def check(migration: Migration, view: View) -> None:
    """A migration leads from the view's placement to its target, and each copy comes from a rank that has it."""
    assert view.placement.apply(migration.changes) == migration.target.placement
    pairs = migration.adds()
    assert list(pairs) == sorted(pairs)
    assert {(source, rank, block) for (source, rank), blocks in pairs.items() for block in blocks} == added(migration)
    assert all(list(blocks) == sorted(set(blocks)) for blocks in pairs.values())
    assert all(source in view.placement.copies[block].ranks for source, _, block in added(migration))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([set(RANKS), {0, 1, 2}, {0, 2, 3}, {0, 3}, {1, 2}]), st.integers(0, 2))
def test_after_a_loss_the_missing_copies_are_added_and_nothing_else_changes(members: set[int], mirrors: int) -> None:
    assume(len(RANKS) - len(members) <= mirrors)  # else state is lost
    with factories(mirrors=mirrors) as made:
        factory = made[min(members)]
        view = view_of(factory, decision(members))
        short = factory.short_of_mirrors(view)
        migration = factory.replenishment(view)
    if not short:
        assert migration is None
        return
    assert migration is not None and migration.urgent
    check(migration, view)
    assert {change.kind for change in migration.changes} == {"add"}
    assert {block for _, _, block in added(migration)} == set(short)
    assert migration.target.assignment == view.assignment
    wanted = 1 + min(mirrors, len(members) - 1)
    assert {len(copies.ranks) for copies in migration.target.placement.copies.values()} == {wanted}


@pytest.mark.parametrize(("mirrors", "allowed"), [(1, {0, 1, 2}), (3, {0, 1, 2, 3})])
def test_missing_copies_go_to_ranks_that_have_voted_if_there_are_enough(mirrors: int, allowed: set[int]) -> None:
    """Copies on a rank that joined count only from the next vote on."""
    with factories(mirrors=mirrors) as made:
        view = view_of(made[0], decision(RANKS, joined=(3,)))
        migration = made[0].replenishment(view)
    assert migration is not None
    assert {rank for _, rank, _ in added(migration)} <= allowed
    assert allowed == {0, 1, 2} or 3 in {rank for _, rank, _ in added(migration)}


@pytest.mark.parametrize("leaving", [(3,), (0,), (1, 2)])
def test_no_copy_stays_with_ranks_that_leave(leaving: tuple[int, ...]) -> None:
    with factories(mirrors=1) as made:
        view = view_of(made[0], decision(RANKS))
        migration = made[0].migration(view, leaving=leaving)
    check(migration, view)
    assert not migration.urgent
    for copies in migration.target.placement.copies.values():
        assert not set(leaving) & set(copies.ranks) and len(copies.ranks) == 2


def test_a_migration_to_another_cut_leads_to_a_view_of_that_cut() -> None:
    """After the loss of rank 3 its pipeline's other rank becomes a pipeline of its own."""
    with factories(mirrors=1) as made:
        views = {rank: view_of(made[rank], decision([0, 1, 2])) for rank in (0, 1, 2)}
        recut = better_assignment(views[0].assignment, [0, 1, 2], made[0].profile, MEMORY)
        assert recut is not None and recut.target.units_of(1) != views[0].assignment.units_of(1)
        for rank, view in views.items():
            migration = made[rank].migration(view, recut.target)
            check(migration, view)
            made[rank].prepare(view, recut.target)
            after = made[rank].with_configuration(view, migration.target)
            assert after.configuration == migration.target and after.generation == view.generation
            assert made[rank].arena.held.units == recut.target.units_of(rank)
            assert (after.domains, after.unproven) == (view.domains, view.unproven)
            assert after.relays == Relays(), "owners compute their units"


def test_a_delegate_stands_in_for_an_owner_that_does_not_compute_the_unit() -> None:
    """Of each such block one message goes to the owner and one comes back; the group knows the delegate alone."""
    with factories(mirrors=3) as made:
        views = {rank: view_of(made[rank], decision(RANKS)) for rank in RANKS}
        assert all(view.relays == Relays() for view in views.values())
        keys = [block.key for block in views[0].owned]
        moved = views[0].placement.apply([Transition("promote", key, 3) for key in keys])
        for rank, view in views.items():
            views[rank] = made[rank].with_configuration(view, replace(view.configuration, placement=moved))
        relays = {rank: view.relays for rank, view in views.items()}
        sent = {rank: [block.key for block in relays[rank].to_owners.outgoing.get(3, ())] for rank in RANKS}
        assert sorted(key for rank in RANKS for key in sent[rank]) == keys
        for rank in RANKS:
            assert [block.key for block in relays[3].to_owners.incoming.get(rank, ())] == sent[rank]
            assert relays[rank].from_owners.incoming == (
                {} if not sent[rank] else {3: relays[rank].to_owners.outgoing[3]}
            )
            owners = {block.owner for span in views[rank].spans for block in span.blocks}
            assert all(owners <= set(span.members) for span in views[rank].spans)
            assert not (sent[rank] and rank == 3), "a rank that computes the unit is no relay to itself"
