"""The simulator runs the plans' own tables, repeats by seed, and keeps its books."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.elastic.plan.model import Profile, UnitCost
from megatron.elastic.plan.planner import nominal_plan
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.topology import regular_topology
from megatron.elastic.simulate.__main__ import main
from megatron.elastic.simulate.engine import StepCosts, simulate_step
from megatron.elastic.simulate.fleet import Fleet
from megatron.elastic.simulate.ft_hsdp import arithmetic, side_by_side
from megatron.elastic.simulate.goodput import Assumptions, Goodput, fleet_policies, run_trace
from megatron.elastic.simulate.rates import FT_HSDP, RATES
from megatron.elastic.simulate.scenarios import (
    FULL,
    Scenario,
    layer_profile,
    lost_cells,
    run_ablation,
    run_scenario,
    scenario_list,
)
from megatron.elastic.simulate.traces import TraceLoss, TraceOptions, failure_trace

DAY = 86_400.0


def test_published_rates_give_published_intervals() -> None:
    """Llama 3: one interruption in about three hours; FT-HSDP: 18 minutes at 100K."""
    assert RATES["llama3"].interval_s(16_384) / 3600 == pytest.approx(54 * 24 / 419)
    assert RATES["ft-hsdp"].interval_s(FT_HSDP.replicas * FT_HSDP.replica_gpus) == pytest.approx(18 * 60)
    assert RATES["rsc1"].interval_s(8 * 1000) == pytest.approx(DAY / 6.5)


def test_ft_hsdps_arithmetic() -> None:
    """44% of the time trains when all wait for a restart; 80% when 12 replicas stall and one of them waits."""
    figures = arithmetic()
    assert figures["synchronous"] == pytest.approx(figures["synchronous_published"], abs=0.005)
    assert figures["ft_hsdp"] == pytest.approx(figures["ft_hsdp_published"], abs=0.005)
    assert figures["ft_hsdp"] == pytest.approx((7 * 11 / 12 + 8) / 18)
    assert figures["ft_hsdp_by_stall_alone"] == pytest.approx(1 - 3 / 18)


def test_a_trace_at_ft_hsdps_rate_gives_about_its_arithmetic() -> None:
    """Failures that hit a recovery begin it anew: stalled for ``1 - exp(-3/18)`` of the time, which is less."""
    found = {result.policy: result for result in side_by_side(days=20.0)}
    assert found["ft-hsdp"].stall_share == pytest.approx(1 - math.exp(-3 / 18), abs=0.02)
    assert found["ft-hsdp"].effective == pytest.approx(0.80, abs=0.03)
    assert found["elaswave"].effective > 0.95


def test_a_step_is_pipeline_reduce_update_gather() -> None:
    unit = UnitCost(1000, 2000, 1000, 1_000_000, 6_000_000, 1, 0)
    profile = Profile((unit,) * 4, link_bytes_per_s=1_000_000_000, latency_ns=0)
    plan = nominal_plan(regular_topology(4, 2, 4, waves=3), profile)
    step = simulate_step(plan, profile, StepCosts(vote_ns=7, update_ns_per_state_byte=0.5))
    assert step.pipeline == plan_time(plan, profile)
    assert step.gather == 2 * 750_000
    assert step.reduce == 2 * step.gather
    assert step.update == 2 * 1_500_000 // 2
    assert step.total == step.pipeline + step.reduce + step.gather + step.update + 7


def test_the_designs_row() -> None:
    row = run_scenario(Scenario(2, 8, 32, 1, "spread", tp=6))
    assert row.elaswave_1f1b == pytest.approx(0.92)
    assert row.ideal_reroute == pytest.approx(0.72, abs=0.002)
    assert row.peers["recycle"] == pytest.approx(row.ideal_reroute)
    assert row.peers["recycle-barrier"] == pytest.approx(0.711, abs=0.001)
    assert row.peers["torchft"] == pytest.approx(0.5)
    assert row.peers["torchft-batch"] == pytest.approx(0.59, abs=0.001)
    assert row.elaswave / row.peers["recycle"] > 1.35
    assert row.elaswave / row.peers["torchft-batch"] > 1.60


@pytest.mark.parametrize("scenario", [s for s in scenario_list() if s.pp <= 12 and s.layers == 32][::7], ids=str)
def test_elaswave_is_near_the_bound_and_no_worse_than_any_peer(scenario: Scenario) -> None:
    """Any peer with a barrier between steps: staggered ones may pass it where half of the cells are gone."""
    row = run_scenario(scenario)
    assert row.elaswave >= 0.95 * row.bound
    assert row.elaswave_1f1b >= 0.95 * row.bound_1f1b
    assert row.elaswave <= row.work_bound + 1e-9
    for name in ("recycle-barrier", "torchft-batch", "mindspeed", "restart"):
        assert row.elaswave >= row.peers[name] - 1e-9, name
    assert row.peers["recycle-barrier"] - 1e-9 <= row.peers["recycle"] <= row.ideal_reroute + 1e-9
    assert row.elaswave - 1e-9 <= row.elaswave_staggered


def test_scenarios_cover_the_issue() -> None:
    scenarios = scenario_list()
    assert {s.dp for s in scenarios} == {2, 3, 4, 8, 12}
    assert {s.losses for s in scenarios} == {1, 2, 4, 8}
    assert {s.layers for s in scenarios} == {32, 40}
    assert all(len(set(lost_cells(s))) == s.losses for s in scenarios)
    assert all(s.dp * s.pp * s.tp <= 96 for s in scenarios)


def test_no_axis_hurts() -> None:
    means = run_ablation([Scenario(2, 8, 32, 1, "spread"), Scenario(3, 4, 32, 2, "spread", waves=8)])
    assert means["all axes"] == max(means.values())
    assert means["no graph"] < means["all axes"]
    assert means["no dataflow"] < means["all axes"]
    assert FULL.split_backward
    assert means["no split backward"] < means["all axes"]


def test_same_seed_same_trace_and_the_rate_is_met() -> None:
    options = TraceOptions(2048, 8, 54, RATES["llama3"].per_device_day, seed=3)
    trace = failure_trace(options)
    assert trace == failure_trace(options)
    assert trace != failure_trace(replace(options, seed=4))
    assert abs(len(trace) - 419) < 5 * math.sqrt(419)
    assert all(a.at_s <= b.at_s for a, b in pairwise(trace))
    wide = failure_trace(replace(options, correlated_share=1.0, correlated_cells=16))
    assert all(loss.first % 16 == 0 and loss.count == 16 for loss in wide)


def small_fleet(**changes: object) -> Fleet:
    return Fleet(replicas=4, stages=8, layers=32, profile=layer_profile(32), **changes)  # type: ignore[arg-type]


def walk(trace: list[TraceLoss], name: str, days: float = 1.0, assumed: Assumptions | None = None) -> Goodput:
    assumed = assumed or Assumptions()
    policy = next(p for p in fleet_policies(assumed, spares=1) if p.name == name)
    return run_trace(small_fleet(), trace, days * DAY, policy, assumed)


def test_without_losses_every_policy_is_fully_effective() -> None:
    for policy in fleet_policies(Assumptions()):
        assert run_trace(small_fleet(), [], DAY, policy).effective == pytest.approx(1.0), policy.name


def test_one_loss_is_accounted_to_the_second() -> None:
    """Restart: 600 s stall, what came after the last checkpoint again, then 4/3 work on three replicas until repair."""
    fleet = small_fleet()
    trace = [TraceLoss(10_000.0, 5, 1, 20_000.0)]
    got = walk(trace, "restart")
    slow = fleet.undamaged_ns() / fleet.dropped_ns(1)
    redone = 10_000 % 600
    damaged = 20_000 - 600
    expected = 10_000 - redone + damaged * slow + (DAY - 30_000)
    assert got.effective * DAY == pytest.approx(expected)
    assert got.stall_share * DAY == pytest.approx(600)
    assert got.redone_share * DAY == pytest.approx(redone)


def test_an_in_step_system_redoes_half_a_step() -> None:
    got = walk([TraceLoss(10_000.0, 5, 1, 20_000.0)], "elaswave")
    assert got.redone_share * DAY == pytest.approx(10.0)
    assert got.stall_share * DAY == pytest.approx(2.0 + 1.0)


def test_losses_during_a_stall_begin_it_anew() -> None:
    got = walk([TraceLoss(1_000.0, 5, 1, 50_000.0), TraceLoss(1_300.0, 9, 1, 50_000.0)], "restart")
    assert got.stall_share * DAY == pytest.approx(300 + 600)


def test_a_cell_lost_twice_counts_once() -> None:
    got = walk([TraceLoss(1_000.0, 5, 1, 50_000.0), TraceLoss(1_300.0, 5, 1, 50_000.0)], "torchft")
    assert got.losses == 1


def test_a_stage_lost_everywhere_stops_all_but_elaswave() -> None:
    trace = [TraceLoss(1_000.0, 8 * replica + 3, 1, 10 * DAY) for replica in range(4)]
    assert walk(trace, "elaswave").effective > 0.8
    assert walk(trace, "recycle").effective < 0.05
    assert walk(trace, "torchft-batch").effective < 0.05


def test_fleet_agrees_with_the_scenario_tables() -> None:
    fleet = Fleet(replicas=2, stages=8, layers=32, profile=layer_profile(32))
    assert fleet.undamaged_ns() / fleet.recut_ns({1: 1}) == pytest.approx(0.92)
    assert fleet.undamaged_ns() / fleet.dropped_ns(1) == pytest.approx(92 / 156)
    assert fleet.undamaged_ns() / fleet.rerouted_ns(1) == pytest.approx(92 / 128)


def test_command_line_prints_json_last_and_draws(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    chart = f"{tmp_path}/goodput.png"
    assert main(["goodput", "--devices", "2048", "--days", "5", "--chart", chart]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert {r["policy"] for r in result["results"]} >= {"elaswave", "recycle", "torchft", "restart"}
    with open(chart, "rb") as file:
        assert file.read(4) == b"\x89PNG"
    assert main(["damage", "--devices", "24", "--losses", "1", "--dp", "2", "--chart", f"{tmp_path}/damage.svg"]) == 0
    rows = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["rows"]
    assert all(row["elaswave"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["table", "--lost", "9"], "--lost 9: cells are 0 to 7"),
        (["table", "--lost", *map(str, range(8))], "--lost names every cell"),
        (["goodput", "--devices", "12"], "--devices 12 are fewer than one replica of --tp 8 x --pp 16"),
        (["damage", "--dp", "5"], "no scenario has these --dp"),
        (["table", "--headroom", "0.01"], "--headroom 0.01: cell 0 needs 41600 bytes, has 416; raise it"),
        (["goodput", "--days", "1e9"], "--days 1e+09: at 7.76 losses a day the trace has more than 1,000,000 losses"),
        (["ft-hsdp", "--days", "1e9"], "use at most 1.25e+04 days"),
        (["table", "--dp", "1000000"], "--dp x --pp x --waves is 32,000,000 pieces of work: use at most 100,000"),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag(
    command: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 1
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["table", "--headroom", "1e300"], "argument --headroom: '1e300' is above 1000"),
        (["table", "--chart", "{folder}"], "is a directory, not a file to write"),
        (["table", "--trace", "{folder}"], "is a directory, not a file to write"),
        (["goodput", "--layers", "1000000000"], "argument --layers: '1000000000' is above 100000"),
        (["table", "--pp", "1000000"], "argument --pp: '1000000' is above 4096"),
        (["goodput", "--seed", "-1"], "argument --seed: '-1' is not a whole number from 0"),
    ],
)
def test_bad_values_are_refused_before_anything_is_simulated(
    command: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder.png"
    folder.mkdir()
    with pytest.raises(SystemExit, match="2"):
        main([part.format(folder=folder) for part in command])
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_file_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device", f"{tmp_path}/trace.json")

    monkeypatch.setattr("megatron.elastic.simulate.__main__.write_chrome_trace", full)
    assert main(["table", "--trace", f"{tmp_path}/trace.json"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("table: [Errno 28] No space left on device") and told.count("\n") == 1
