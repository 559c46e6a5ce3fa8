"""The tests of PyTorch and of torchft pass on our groups. They come with the packages."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import torch_suite, torchft_suite


@pytest.mark.slow
def test_pytorchs_distributed_tests_pass_on_elastic() -> None:
    found = torch_suite.results("elastic")
    assert [outcome for _, outcome in found if outcome.status == "failed"] == []
    assert any(outcome.status == "passed" for _, outcome in found)


@pytest.mark.slow
def test_torchfts_tests_pass_on_our_process_group(tmp_path: Path) -> None:
    try:
        packages = torchft_suite.install(tmp_path)
    except subprocess.CalledProcessError:
        pytest.skip("torchft cannot be installed here")
    suites = torchft_suite.run(packages)
    assert suites["elastic"]["failures"] == {} and suites["elastic"]["passed"] >= suites["gloo"]["passed"] > 0
