"""The stand-in devices keep what the device path is tested for, and parts of the engine run on them."""

from __future__ import annotations

import signal

import pytest

from tests.standin.forked import Outcome, results
from tests.unit.standin import (
    device_checks,
    engine_checks,
    host_link_checks,
    own_device_checks,
    state_checks,
    timing_checks,
    vendor_checks,
)

MODULES = (
    *(device_checks, engine_checks, state_checks),
    *(host_link_checks, own_device_checks, timing_checks, vendor_checks),
)
CHECKS = [(module.__name__, name) for module in MODULES for name in vars(module) if name.startswith("check_")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    modules = sorted({module for module, _ in CHECKS})
    return results(modules, tmp_path_factory.mktemp("standin") / "outcomes.json")


@pytest.mark.parametrize("name", [name for _, name in CHECKS])
def test_claim(outcomes: dict[str, Outcome], name: str) -> None:
    status, text = outcomes[name]
    if name.startswith("check_dies_"):
        assert status == -signal.SIGSEGV and "the host touched memory of device" in text, text
    else:
        assert status == 0, text


def test_no_check_hides_another_of_its_name() -> None:
    assert len(CHECKS) == len({name for _, name in CHECKS})
