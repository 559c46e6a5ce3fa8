"""Any parallel sizes into any others while training: the same losses, one switch, and losses on the way.

The model is cut over the ranks of a cell also at tensor-parallel size 1 (``Program(cut=True)``).
"""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.control.requests import ParallelSizes
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.inject import STEP_POINTS
from megatron.elastic.state.layout import BlockKey
from tests.cluster.checks import check
from tests.cluster.cluster import UNITS, Cluster, Program, RankProcess, run
from tests.cluster.cut_model import GROUPS
from tests.cluster.test_cells_of_any_size import engine_of, masters, move_to, parameters
from tests.cluster.test_random import DELAYS, QUICK, SEEDS, kills
from tests.scenario.scenario import Layout, Scenario

CUT, GRID = Program(cut=True), Program(grid=True)
WHOLE_JOB = (*STEP_POINTS, "between_steps", "in_evaluate")
ON_THE_WAY = ("in_migration_begin", "in_migration_finish", "in_migration_switch")
RECOVERY = ("in_recovery_freeze", "in_recovery_decide", "in_recovery_edit", "in_recovery_promote", "in_recovery_resume")


def grids(ranks: int, context: int = 1) -> list[ParallelSizes]:
    """All sizes of that many ranks that the model's units allow. ``context``: parts of the sequence."""
    rest = ranks // context
    sizes = (ParallelSizes(t, p, rest // t // p, context) for t in range(1, rest + 1) for p in range(1, UNITS + 1))
    return [one for one in sizes if one.ranks == ranks]


def pairs(ranks: int) -> list[tuple[ParallelSizes, ParallelSizes]]:
    """(sizes at the launch, other sizes) with enough micro-batches, and a launch that cuts the model evenly."""
    return [
        (before, after)
        for before, after in permutations(grids(ranks), 2)
        if after.data <= Scenario().micro_batches * before.data and GROUPS % before.tensor == 0
    ]


PAIRS = [
    pytest.param(*pair, marks=() if number % 27 == 3 else pytest.mark.slow, id=f"{pair[0]} to {pair[1]}")
    for number, pair in enumerate((*pairs(4), *pairs(8)))
]


SHARED = [*grids(4), *grids(4, 2)]
SHARED_PAIRS = [
    pytest.param(before, after, marks=() if number % 19 == 7 else pytest.mark.slow, id=f"{before} to {after}")
    for number, (before, after) in enumerate(
        (before, after)
        for before, after in permutations(SHARED, 2)
        if before.context + after.context > 2
        and after.data <= Scenario().micro_batches * before.data
        and GROUPS % before.tensor == 0
    )
]
"""Sizes of four ranks of which some share the sequence before, afterwards, or both."""


def layout(sizes: ParallelSizes) -> str:
    return str(Layout(sizes.tensor, sizes.pipeline, sizes.data, context=sizes.context))


def wish(sizes: ParallelSizes, step: int) -> str:
    return f"reshape:to={'|'.join(map(str, sizes))},step={step}"


def in_force(cluster: Cluster) -> ParallelSizes:
    """The sizes at the end, the same on every rank and for the agents' answer to ``ctl``."""
    found = {engine_of(process).view.assignment.base.sizes for process in cluster.finished}
    assert len(found) == 1
    return found.pop()


def told(cluster: Cluster) -> tuple[str, str]:
    """The end of the newest request, as every agent knows it."""
    states = [agent.state.reshapes for agent in cluster.agents if not agent.process.dead]
    ends = {(reshapes.state, reshapes.text) for reshapes in states}
    assert len(ends) == 1
    return ends.pop()


def lost_steps(cluster: Cluster) -> int:
    return sum(outcome.lost_steps for process in cluster.processes for outcome in process.recoveries)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_every_sizes_into_every_other(before: ParallelSizes, after: ParallelSizes) -> None:
    """Every row passes every unit; the switch is one step on all ranks; all sizes compute the same."""
    cells: dict[int, set[tuple[tuple[int, ...], ...]]] = {}

    def fenced(rank: RankProcess, step: int) -> None:
        cells.setdefault(step, set()).add(tuple(cell.ranks for cell in engine_of(rank).view.plan.cells))

    cluster = run(f"{layout(before)} steps=9 {wish(after, 2)}", Program(cut=True, fenced=fenced))
    check(cluster, settled=True)
    assert in_force(cluster) == after and told(cluster)[0] == "in force"
    assert all(len(seen) == 1 for seen in cells.values()), f"ranks differ: {cells}"
    in_order = [seen.pop() for _, seen in sorted(cells.items())]
    assert len(list(dict.fromkeys(in_order))) <= 2 and in_order == sorted(in_order, key=in_order.index)


@pytest.mark.parametrize(("before", "after"), SHARED_PAIRS)
def test_ranks_that_share_the_sequence_into_others(before: ParallelSizes, after: ParallelSizes) -> None:
    """Weights are replicated over the parts, so any sizes hold the state of any others."""
    cluster = run(f"{layout(before)} steps=9 {wish(after, 2)}", GRID)
    check(cluster, settled=True)
    assert in_force(cluster) == after and told(cluster)[0] == "in force"
    view = survivor(cluster).view
    assert {len(cell.ranks) for cell in view.plan.cells} == {after.cell}


@pytest.mark.parametrize(
    ("start", "through", "program"),
    [
        ("2|2|1", ["1|4|1", "4|1|1"], CUT),
        ("2|2|1", ["1|2|2", "3|1|1", "1|4|1"], CUT),
        pytest.param("1|2|1|2", ["2|1|1|2", "4|1|1", "1|1|2|2"], GRID, marks=pytest.mark.slow),
        pytest.param("2|2|1", ["1|2|1|2", "3|1|1", "2|1|1|2"], GRID, marks=pytest.mark.slow),
    ],
    ids=["weights", "weights, uneven", "sequence", "both"],
)
def test_through_other_sizes_and_back_to_the_launchs(start: str, through: list[str], program: Program) -> None:
    wishes = [f"reshape:to={to},step={2 + 6 * i}" for i, to in enumerate([*through, start])]
    at_launch = layout(ParallelSizes(*map(int, start.split("|"))))
    cluster = run(f"{at_launch} steps={6 + 6 * len(wishes)} {' '.join(wishes)}", program)
    check(cluster, settled=True)
    for process in cluster.finished:
        assert engine_of(process).view.assignment.shape is None and engine_of(process).view.assignment.is_nominal


@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from(["tp2pp2dp1", "tp4dp1", "dp4", "tp2cp2dp1"]),
    st.lists(st.sampled_from(grids(4) + grids(3) + grids(2) + grids(4, 2)), min_size=2, max_size=4),
    st.integers(0, 1000),
)
def test_state_is_bitwise_unchanged_by_changes_of_sizes_without_steps_between(
    start: str, through: list[ParallelSizes], seed: int
) -> None:
    wanted, held = dict[BlockKey, torch.Tensor](), dict[BlockKey, torch.Tensor]()

    def fenced(rank: RankProcess, step: int) -> None:
        if step != 2:
            return
        engine = engine_of(rank)
        before, values = masters(engine), parameters(engine)
        first, living = engine.view.assignment, engine.view.living
        for sizes in (*through, first.base.sizes):
            if sizes.data <= engine.views.launch_topology.grid.global_batch_size:
                move_to(engine, engine.views.reshaped(living, sizes))
        assert engine.view.assignment == first
        assert torch.equal(parameters(engine), values), f"rank {rank.rank}: other parameters"
        wanted.update(before)
        held.update(masters(engine))

    check(run(f"{start} steps=4 seed={seed} evaluate=0", Program(grid=True, fenced=fenced)))
    assert wanted.keys() == held.keys()
    assert all(torch.equal(wanted[key], held[key]) for key in wanted), "masters or moments differ"


KILLS = [
    pytest.param(point, rank, back, marks=() if (number, back) == (2 * rank, "soon") else pytest.mark.slow)
    for number, point in enumerate((*ON_THE_WAY, *WHOLE_JOB))
    for rank in range(4)
    for back in ("soon", "never")
]


@pytest.mark.parametrize(("point", "rank", "back"), KILLS)
def test_a_loss_on_the_way(point: str, rank: int, back: str) -> None:
    """The rank returns: the sizes come into force. It does not: the request is refused, and the job goes on."""
    where = "" if point in ON_THE_WAY else ",step=5"
    kill = f"kill:rank={rank},point={point}{where}"
    mode = "" if back == "soon" else "mirrors=2 tensor=live-on"
    cluster = run(f"tp2pp2dp1 steps=16 seed={rank} back={back} {mode} {kill} reshape:to=1|4|1,step=2", CUT)
    check(cluster)
    assert lost_steps(cluster) == 0
    state, text = told(cluster)
    if back == "soon":
        assert state == "in force" and in_force(cluster) == ParallelSizes(1, 4, 1)
    else:
        assert state == "in force" or "no more are expected" in text


SHARED_KILLS = [
    pytest.param(point, rank, to, marks=() if (number, rank) == (1, 0) else pytest.mark.slow)
    for number, point in enumerate((*ON_THE_WAY, *WHOLE_JOB))
    for rank in range(4)
    for to in (("2|1|1|2",) if number % 2 else ("1|4|1",))
]


@pytest.mark.parametrize(("point", "rank", "to"), SHARED_KILLS)
def test_a_loss_on_the_way_between_cells_that_share_the_sequence(point: str, rank: int, to: str) -> None:
    """Launched as two stages of two parts each: into two parts of two ranks, or into one rank a stage."""
    where = "" if point in ON_THE_WAY else ",step=5"
    kill = f"kill:rank={rank},point={point}{where}"
    cluster = run(f"cp2pp2dp1 steps=16 seed={rank} tensor=live-on {kill} reshape:to={to},step=2", GRID)
    check(cluster)
    assert lost_steps(cluster) == 0
    assert in_force(cluster) == ParallelSizes(*map(int, to.split("|"))) and told(cluster)[0] == "in force"


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("point", RECOVERY)
def test_a_second_loss_in_the_recovery_from_a_loss_on_the_way(point: str, first: int) -> None:
    second = (first + 1) % 4
    kills = f"kill:rank={first},point=in_migration_finish kill:rank={second},missing=1,point={point}"
    cluster = run(f"tp2pp2dp1 steps=16 seed={first} mirrors=2 {kills} reshape:to=4|1|1,step=2", CUT)
    check(cluster)
    assert in_force(cluster) == ParallelSizes(4, 1, 1)


SCRIPTS = (st.lists(kills(), min_size=1, max_size=3).map(" ".join), SEEDS, DELAYS, st.sampled_from(["park", "live-on"]))


def goes_through(
    launch: str, program: Program, script: str, seed: int, back: float, tensor: str, through: list[ParallelSizes]
) -> None:
    """No step is lost, whatever is asked for and lost."""
    wishes = " ".join(wish(sizes, 1 + 2 * i) for i, sizes in enumerate(through))
    scenario = f"{launch} steps=10 seed={seed} back={back} mirrors=3 migrate_after=1 tensor={tensor} {script} {wishes}"
    cluster = run(scenario, program)
    check(cluster)
    assert lost_steps(cluster) == 0


@QUICK
@given(*SCRIPTS, st.lists(st.sampled_from(grids(4) + grids(3)), min_size=1, max_size=3))
def test_scripts_of_kills_returns_and_requests(
    script: str, seed: int, back: float, tensor: str, through: list[ParallelSizes]
) -> None:
    goes_through("tp2pp2dp1", CUT, script, seed, back, tensor, through)


@pytest.mark.slow
@QUICK
@given(*SCRIPTS, st.lists(st.sampled_from(SHARED), min_size=1, max_size=3), st.sampled_from(["cp2pp2dp1", "tp2dp2"]))
def test_scripts_of_kills_returns_and_requests_for_parts_of_the_sequence(
    script: str, seed: int, back: float, tensor: str, through: list[ParallelSizes], launch: str
) -> None:
    goes_through(launch, GRID, script, seed, back, tensor, through)


def survivor(cluster: Cluster) -> Engine:
    return engine_of(next(process for process in cluster.finished if process.incarnation == 0))


def stays_in_force(sizes: ParallelSizes, tensor: str, rank: int, program: Program) -> Cluster:
    """The cluster after a loss of the sizes, which the rank that returns completes."""
    lost = f"kill:rank={rank},step=11,point=mid_backward"
    cluster = run(f"tp2pp2dp1 steps=20 tensor={tensor} {lost} {wish(sizes, 2)}", program)
    check(cluster)
    view = survivor(cluster).view
    assert view.assignment.base.sizes == sizes and view.assignment.is_nominal and not view.plan.parked
    return cluster


@pytest.mark.parametrize("tensor", ["park", "live-on"])
@pytest.mark.parametrize("rank", [1, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 2, 3))])
def test_the_sizes_stay_in_force_after_a_loss(rank: int, tensor: str) -> None:
    """A loss is one of these sizes, and the rank that returns takes its own place in them."""
    stays_in_force(ParallelSizes(4, 1, 1), tensor, rank, CUT)


@pytest.mark.parametrize("rank", [1, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 2, 3))])
def test_a_cell_that_came_to_share_the_sequence_goes_on_with_a_part_less(rank: int) -> None:
    """Two parts of two ranks each: the whole group computes all of the sequence until the rank is back."""
    cluster = stays_in_force(ParallelSizes(2, 1, 1, 2), "live-on", rank, GRID)
    plans = next(process.plans for process in cluster.finished if process.incarnation == 0)
    assert [len(cell.ranks) for cell in plans[0].cells] == [2] and [len(cell.ranks) for cell in plans[-1].cells] == [4]


def test_new_nodes_join_for_larger_sizes() -> None:
    """Spares that the sizes need are admitted, then all ranks compute; more than one tensor-parallel size at once."""
    cluster = run("tp2pp2dp1 spares=4 steps=16 seed=1 reshape:to=4|2|1,step=2", CUT)
    check(cluster, settled=True)
    assert in_force(cluster) == ParallelSizes(4, 2, 1)
    assert all(len(cell.ranks) == 4 for cell in survivor(cluster).view.plan.cells)
    assert survivor(cluster).view.living == tuple(range(8))


def test_a_number_of_ranks_that_no_launch_cell_divides() -> None:
    """Of spares in cells of two one is admitted alone: the sizes need it."""
    cluster = run("tp2pp2dp1 spares=2 steps=16 seed=2 reshape:to=5|1|1,step=2", CUT)
    check(cluster, settled=True)
    assert in_force(cluster) == ParallelSizes(5, 1, 1) and survivor(cluster).view.living == tuple(range(5))


@pytest.mark.parametrize(
    ("to", "setting", "why"),
    [
        ("1|1|4", "", "TP 1, PP 1, DP 4: 4 replicas for 2 micro-batches a step"),
        ("1|5|1", "spares=2", "TP 1, PP 5, DP 1: 5 stages for 4 layers, embedding and head counted"),
        ("2|4|1", "", "TP 2, PP 4, DP 1 takes 8 ranks, and 4 are members; no more are expected"),
    ],
)
def test_sizes_that_cannot_be_are_refused_in_one_line(to: str, setting: str, why: str) -> None:
    """Nothing moves, and the next request is heard."""
    cluster = run(f"tp2pp2dp1 steps=14 {setting} reshape:to={to},step=2 reshape:to=1|2|2,step=8", CUT)
    check(cluster)
    assert in_force(cluster) == ParallelSizes(1, 2, 2)
    lines = [line for line in cluster.finished[0].notices if "refused" in line]
    assert lines == [f"reshape refused: {why}"]


@pytest.mark.parametrize(
    ("to", "setting", "why"),
    [
        ("1|1|1|4", "", "CP 4 takes a length that is a multiple of 8, and it is 4"),
        pytest.param(
            *("1|1|1|2", "exact=on", "--elastic-exact needs all of a sample on one rank"), marks=pytest.mark.slow
        ),
        pytest.param(
            *("1|1|4|2", "", "TP 1, CP 2, PP 1, DP 4 takes 8 ranks, and 4 are members; no more are expected"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_parts_of_the_sequence_that_cannot_be_are_refused_in_one_line(to: str, setting: str, why: str) -> None:
    cluster = run(f"pp2dp2 steps=14 {setting} reshape:to={to},step=2 reshape:to=1|4|1,step=8", GRID)
    check(cluster)
    assert in_force(cluster) == ParallelSizes(1, 4, 1)
    (line,) = [line for line in cluster.finished[0].notices if "refused" in line]
    assert line.startswith("reshape refused: TP 1, CP") and line.endswith(why)


def test_exact_mode_keeps_its_tensor_parallel_size() -> None:
    cluster = run("tp2pp2dp1 steps=14 exact=on reshape:to=4|1|1,step=2 reshape:to=2|1|2,step=8", CUT)
    check(cluster)
    assert in_force(cluster) == ParallelSizes(2, 1, 2), "the same size on other ranks"
    assert any("--elastic-exact keeps it" in line for line in cluster.finished[0].notices)
