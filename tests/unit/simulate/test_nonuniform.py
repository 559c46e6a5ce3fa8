"""Cells of unequal size at the scale of nonuniform tensor parallelism: who loses how much throughput."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.elastic.plan.cost import PPM
from megatron.elastic.plan.tensor import reduced_cells
from megatron.elastic.simulate.nonuniform import NTP, WAYS, Setting, damaged, kept, power_gain_ppm

SMALL = Setting(replicas=16, stages=4, tensor=8, layers=22, heads=32, columns=4 * 4096, failed=2e-2)


def lost(way: str, setting: Setting = NTP, seed: int = 0) -> float:
    return 1 - kept(way, setting, seed)


def test_living_on_loses_at_most_three_percent_of_the_papers_setting() -> None:
    """32,768 devices, 4e-3 of them failed; 12% by dropping replicas, as the paper says."""
    assert lost("dropping replicas, damage packed at a restart") == pytest.approx(0.12, abs=0.02)
    assert lost("living on, layers cut anew") <= 0.03
    assert lost("living on with clocks") <= 0.01
    assert lost("ntp with power") <= 0.01
    assert lost("ntp") == pytest.approx(0.03, abs=0.005)


def test_each_axis_gains_throughput_there() -> None:
    assert lost("living on") < lost("parking") and lost("living on, layers cut anew") < lost("parking, layers cut anew")
    assert lost("living on, layers cut anew") < lost("living on")
    assert lost("living on with clocks") < lost("living on")


@pytest.mark.parametrize("way", WAYS)
def test_without_failed_devices_no_way_loses_anything(way: str) -> None:
    assert lost(way, replace(SMALL, failed=0.0)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_no_way_passes_the_undamaged_job_and_the_axes_together_are_the_best(seed: int) -> None:
    found = {way: kept(way, SMALL, seed) for way in WAYS}
    assert all(value <= 1 + 1e-9 for value in found.values())
    best = found["living on with clocks, layers cut anew"]
    for way in ("parking", "parking, layers cut anew", "living on", "living on, layers cut anew"):
        assert found[way] <= best + 1e-9, way


def test_a_draw_loses_the_devices_that_it_says_and_repeats_by_seed() -> None:
    for sizes in (None, (30, 28)):
        cells = damaged(NTP, 3, sizes)
        assert cells == damaged(NTP, 3, sizes) != damaged(NTP, 4, sizes)
        computing = sum(len(cell.ranks) for cell in cells.cells)
        assert computing + len(cells.parked) == 32_768 - 131
        assert {len(cell.ranks) for cell in cells.cells} <= (set(range(28, 33)) if sizes is None else {28, 30, 32})
        assert len(reduced_cells(cells)) > 100


def test_a_group_is_as_fast_as_its_rank_with_most_heads() -> None:
    """Attention is 0.375 of a layer: 31 ranks share 128 heads as 5 and 4, 32 ranks as 4 each."""
    assert NTP.rate_ppm(32) == PPM
    assert NTP.rate_ppm(31) == pytest.approx(PPM / (0.375 * 5 / 4 + 0.625 * 2643 / 2560), rel=1e-6)
    assert NTP.rate_ppm(16) == PPM // 2
    rates = [NTP.rate_ppm(size) for size in range(1, 33)]
    assert rates == sorted(rates)


def test_power_gains_less_than_it_costs() -> None:
    assert power_gain_ppm(1.0) == PPM and power_gain_ppm(1.2) == 1_122_000
    for power in (1.05, 1.1, 1.2, 1.3):
        assert PPM < power_gain_ppm(power) < power * PPM
    with pytest.raises(ValueError, match=r"between 1 and 1\.3"):
        power_gain_ppm(1.4)
