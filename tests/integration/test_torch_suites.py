"""The tests of PyTorch and of torchft pass on our groups. They come with the packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import torch_suite, torchft_suite
from tools.suites import ROOT


@pytest.mark.slow
def test_pytorchs_distributed_tests_pass_on_elastic() -> None:
    found = torch_suite.results("elastic")
    assert [outcome for _, outcome in found if outcome.status == "failed"] == []
    assert any(outcome.status == "passed" for _, outcome in found)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with torchft."""
    try:
        return torchft_suite.install(tmp_path_factory.mktemp("torchft"))
    except subprocess.CalledProcessError:
        pytest.skip("torchft cannot be installed here")


@pytest.mark.slow
def test_an_aborted_group_says_so_until_it_is_configured_again(packages: Path) -> None:
    """:mod:`megatron.elastic.comm.torchft_group`, whose errors torchft's own tests do not ask for."""
    script = Path(__file__).with_name("torchft_member.py")
    paths = os.pathsep.join([str(ROOT), str(packages)])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_torchfts_tests_pass_on_our_process_group(packages: Path) -> None:
    # Whether that newcomer finds the others still there depends on time, on gloo too (docs/log.md, 2026-11-25).
    suites = torchft_suite.run(packages, only="^(?!.*test_streaming_diloco_upscale)", repeats=2)
    passed = {backend: suite["passed"] + suite["passed_when_repeated"] for backend, suite in suites.items()}
    assert suites["elastic"]["failures"] == {} and passed["elastic"] >= passed["gloo"] > 0
