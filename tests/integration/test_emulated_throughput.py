"""An emulated job under the real launcher runs what the simulator says, before and after a kill."""

from __future__ import annotations

import pytest

from megatron.elastic.simulate.cases import Case
from megatron.elastic.simulate.scenarios import Scenario
from tools.bench.throughput import Refused, emulate


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["elaswave-split", "torchft"])
def test_committed_throughput_is_the_simulators(policy: str) -> None:
    case = Case(Scenario(2, 4, 8, 1, "spread", waves=4), policy)
    try:
        result = emulate(case)
    except Refused as busy:
        pytest.skip(str(busy))
    assert result.relative == pytest.approx(result.simulated_relative, rel=0.1)
    assert result.before_s >= result.simulated_before_s, "waits and messages cannot be faster than waits"
