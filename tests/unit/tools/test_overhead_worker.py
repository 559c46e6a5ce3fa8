"""The clocks of the ``overhead`` benchmark are put on functions that exist: a renamed one would end the benchmark."""

from __future__ import annotations

from tools.bench._overhead_worker import CLOCKED
from tools.bench.overhead import COSTS


def test_every_clocked_function_exists() -> None:
    missing = [name for owner, name, _ in CLOCKED if not callable(vars(owner).get(name))]
    assert not missing


def test_every_reported_cost_has_a_clock() -> None:
    by_block = {"update_owned", "replay_mirrored"}
    assert set(COSTS) <= {clock for _, _, clock in CLOCKED if isinstance(clock, str)} | by_block
