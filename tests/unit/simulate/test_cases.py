"""Emulation and simulator mean the same ranks, plans and costs; the page takes its figures from the benches."""

from __future__ import annotations

import pytest

from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.planner import nominal_plan
from megatron.elastic.plan.schedule.validate import validate_plan
from megatron.elastic.simulate.cases import ANSWERS, Case, answer, predict
from megatron.elastic.simulate.clocks import clock_ablation
from megatron.elastic.simulate.scenarios import Scenario, ScenarioRow, lost_cells, run_scenario, scenario_topology
from tools.simulation_docs import rewritten, summary

ONE_LOSS = Scenario(2, 8, 32, 1, "spread")


@pytest.mark.parametrize(
    ("policy", "relative"),
    [("elaswave", 0.92), ("alike", 0.86), ("torchft", 0.50), ("torchft-batch", 0.59), ("elaswave-split", 1.13)],
)
def test_the_designs_example(policy: str, relative: float) -> None:
    assert predict(Case(ONE_LOSS, policy)).relative == pytest.approx(relative, abs=0.005)


@pytest.mark.parametrize("policy", sorted(ANSWERS))
def test_every_answer_is_a_valid_plan_and_no_piece_is_shorter_than_asked(policy: str) -> None:
    case = Case(Scenario(2, 4, 8, 1, "spread", waves=4), policy, piece_ms=50.0)
    _, after = scenario_topology(case.scenario)
    validate_plan(answer(policy, after, case.profile), 8)
    second = case.seconds_per_ns()
    assert predict(case).before_s == pytest.approx(21 * 2000 * second), "7 waves of forward and backward of two layers"
    assert second * 2000 >= 0.05 - 1e-9
    assert Case.from_json(case.to_json()) == case


def test_lost_ranks_are_those_of_the_lost_cells() -> None:
    case = Case(Scenario(3, 4, 8, 4, "spread"), "elaswave")
    before, after = scenario_topology(case.scenario)
    nominal = LaunchTopology(1, 4, 3, ((0, 2), (2, 4), (4, 6), (6, 8)), before.grid)
    living = set(range(12)) - set(case.lost_ranks())
    seen = Assignment.at_launch(nominal).topology(living)
    assert {cell.id for cell in seen.cells} == {cell.id for cell in after.cells}
    assert {cell.id for cell in before.cells} - {cell.id for cell in seen.cells} == set(lost_cells(case.scenario))


def test_one_rank_of_a_group_is_lost_where_groups_have_several() -> None:
    case = Case(Scenario(2, 2, 8, 1, "spread", waves=8, tp=4), "elaswave")
    assert lost_cells(case.scenario) == [1] and case.lost_ranks() == [11]
    nominal = LaunchTopology(4, 2, 2, ((0, 4), (4, 8)), scenario_topology(case.scenario)[0].grid)
    assert nominal.cell_of(11).id == 1


def test_living_on_keeps_more_throughput_than_parking_and_that_more_than_dropping_the_replica() -> None:
    """TP 4 × PP 2 × DP 2, one rank lost: the slow pipeline computes seven micro-batches of sixteen."""

    def kept(policy: str, lives_on: bool) -> float:
        return predict(Case(Scenario(2, 2, 8, 1, "spread", waves=8, tp=4, lives_on=lives_on), policy)).relative

    assert kept("instant", True) > kept("elaswave", False) > kept("torchft-batch", False)
    assert kept("elaswave", True) >= kept("instant", True)
    assert kept("instant", True) == pytest.approx(9 / (1 + 7 * 4 / 3), abs=0.001)
    assert kept("torchft-batch", False) == pytest.approx(9 / 17, abs=0.001)


def test_whole_topologies_run_megatrons_plan_under_every_answer() -> None:
    before, _ = scenario_topology(ONE_LOSS)
    profile = Case(ONE_LOSS, "elaswave").profile
    assert answer("alike", before, profile) == nominal_plan(before, profile)
    with pytest.raises(PlanError, match="unknown policy"):
        answer("none", before, profile)


def test_clocks_lowered_cost_no_time_and_save_energy() -> None:
    gains = clock_ablation([Scenario(2, 4, 16, 1, "spread", waves=8)])
    assert gains["lowered"].throughput == 1.0
    assert gains["lowered"].energy < 1.0 < gains["raised"].throughput


def test_rows_survive_a_file_and_fill_the_page() -> None:
    row = run_scenario(Scenario(2, 2, 4, 1, "spread", waves=4))
    assert ScenarioRow.from_flat(row.flat()) == row
    page = rewritten("before\n<!-- begin summary -->\nold\n<!-- end -->\nafter", {"summary": summary([row])})
    assert page.startswith("before\n<!-- begin summary -->\n- 1 scenarios.") and page.endswith("<!-- end -->\nafter")
    with pytest.raises(KeyError, match="no section"):
        rewritten(page, {"other": ""})
