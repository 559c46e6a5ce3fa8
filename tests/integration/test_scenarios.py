"""The scenarios of the bounded model and of the cluster as real jobs (``tests/scenario``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.elastic_job import ROOT, environment_of
from tests.scenario.in_job import play
from tests.scenario.named import NAMED, Named

EACH_TIME = (2,)
"""Rules whose scenario runs in each round of tests: a committed step is finished, a vote is taken again."""


@pytest.mark.parametrize(
    "named", [pytest.param(n, id=str(n), marks=() if n.rule in EACH_TIME else pytest.mark.slow) for n in NAMED]
)
def test_named(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, named: Named) -> None:
    ended = play(named.scenario, tmp_path, tmp_path_factory.getbasetemp() / "undisturbed")
    assert ended in (("kept", "lost") if named.may_lose else ("kept",))


@pytest.mark.slow
def test_a_text_runs_as_a_job_by_one_command() -> None:
    text = "dp2 steps=3 seed=17 back=never evaluate=0 mirrors=1 kill:rank=1,step=2,point=after_ship"
    command = [sys.executable, "-m", "tests.scenario", text, "--as", "job"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment_of(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "struck: rank 1 at after_ship of step 2" in done.stdout and f"kept: {text}" in done.stdout
