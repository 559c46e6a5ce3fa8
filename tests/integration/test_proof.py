"""The proof of a machine's devices runs on the stand-in accelerator as on any, so that only the hardware is unknown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.elastic_job import ROOT
from tests.standin.library import build
from tests.standin.vendor import with_hccl, with_nccl
from tools.proof.machine import Machine
from tools.proof.sections import SECTIONS, Settings

pytestmark = pytest.mark.slow

PLATFORMS = {"cuda": ("tests.standin.platform:NcclPlatform", with_nccl), "npu": ("npu", with_hccl)}


def test_the_section_of_fp8_passes_with_layers_that_keep_scales(tmp_path: Path) -> None:
    """On a CPU, with layers that round as those of Transformer Engine do (``delayed_scaling_training.py``)."""
    script = str(ROOT / "tests" / "integration" / "delayed_scaling_training.py")
    found = SECTIONS["fp8"](Machine("cpu", 1, {}, tmp_path, script), Settings.short())
    assert found["passed"] is True, found
    assert [row["recipe"] for row in found["recipes"]] == ["delayed"]


@pytest.mark.parametrize("kind", PLATFORMS)
def test_the_short_form_passes_on_the_stand_in(tmp_path: Path, kind: str) -> None:
    build()
    platform, environment = PLATFORMS[kind]
    command = [
        "--platform",
        platform,
        "--one-device",
        "STANDIN_DEVICES=1",
        "--short",
        "--plain-alone",
        "--out",
        str(tmp_path / "out"),
    ]
    more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment(tmp_path / "library")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tools.proof", *command],
        cwd=ROOT,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(report["sections"]) == set(SECTIONS) and report["devices"] == 4
    kernels = report["sections"]["kernels"]
    assert kernels["passed"] and kernels["dropout"]["equal"] == kernels["dropout"]["cases"] > 0
    assert kernels["adam"]["kernel_gb_per_second"] > 0
    kills = report["sections"]["kills"]
    assert kills["kills"] == kills["returned"] == 1 and kills["mttr_seconds"]["to_next_commit"] > 0
    fp8 = report["sections"]["fp8"]
    assert fp8["passed"] is None and fp8["why"].startswith("error: --fp8-format")
    assert "| kills | passed |" in (tmp_path / "out" / "report.md").read_text()
