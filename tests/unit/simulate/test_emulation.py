"""Tables run for real: they end, never sooner than simulated, and a busy machine is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.elastic.plan.model import Op
from megatron.elastic.plan.planner import instant_plan
from megatron.elastic.plan.search.steady import steady_plan
from megatron.elastic.plan.topology import regular_topology, without_cells
from megatron.elastic.simulate.emulate import MachineTooBusy, emulate
from megatron.elastic.simulate.scenarios import layer_profile

PROFILE = replace(layer_profile(8), latency_ns=500)
ANY = 1e9
"""A dilation no machine reaches: these tests are about order, not about speed."""


@pytest.mark.parametrize("kind", ["reroute", "resize", "steady", "split"])
def test_threads_finish_the_tables_and_never_sooner_than_simulated(kind: str) -> None:
    topology = without_cells(regular_topology(3, 3, 8, 2, 4), [4])
    if kind == "steady":
        plan = steady_plan(topology, PROFILE)
    else:
        plan = instant_plan(
            topology, PROFILE, "resize" if kind == "resize" else "reroute", split_backward=kind == "split"
        )
    run = emulate(plan, PROFILE, scale=1000.0, max_dilation=ANY)
    assert run.measured_ns >= run.simulated_ns * 0.999
    assert run.dilation >= 0


def test_a_busy_machine_is_refused() -> None:
    plan = instant_plan(regular_topology(1, 2, 8, waves=2), PROFILE)
    with pytest.raises(MachineTooBusy, match="longer than asked"):
        emulate(plan, PROFILE, scale=0.001, max_dilation=0.001)


def test_a_message_that_never_comes_is_an_error_not_a_hang() -> None:
    plan = instant_plan(regular_topology(1, 2, 8, waves=2), PROFILE)
    cut = tuple((cell, tuple(a for a in table if a.op is not Op.SEND_FORWARD)) for cell, table in plan.tables)
    with pytest.raises(TimeoutError, match="never came"):
        emulate(replace(plan, tables=cut), PROFILE, scale=1.0, timeout=1.0)
