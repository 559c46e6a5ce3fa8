"""The live page's script, run by node on stand-ins of the browser's objects; ``test_dashboard.py`` has a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.integration.elastic_job import ROOT
from tests.unit.control.test_status_text import STATUS

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")

SCRIPT = ROOT / "megatron" / "elastic" / "launch" / "agent" / "page" / "dashboard.js"
AT = 400.0
"""Seconds of the job at which the page is drawn."""


def state(**progress: Any) -> dict[str, Any]:
    """An answer of the launcher: three steps, the last one 60 s ago, the first one without a loss."""
    status = msgspec.to_builtins(STATUS, str_keys=True)
    samples = [
        {"at": AT - 60.0 - 3 * age, "step": 40 - age, "seconds": 1.0, "loss": None if age == 2 else 3.0}
        for age in (2, 1, 0)
    ]
    return {
        "status": {**status, "job_s": AT, "progress": {**status["progress"], **progress}},
        "samples": samples,
        "topology": None,
    }


def shown(tmp_path: Path, *answers: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What the page shows after each answer; ``None``: the launcher does not answer."""
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    done = subprocess.run(
        ["node", str(Path(__file__).with_name("page_script.js")), str(SCRIPT), str(tmp_path / "answers.json")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def figures(page: dict[str, Any]) -> dict[str, str]:
    texts = [str(text) for text in page["texts"]["figures"]]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def test_a_step_is_its_mean_duration_and_the_last_one_has_an_age(tmp_path: Path) -> None:
    """24 s between two steps, such as an evaluation takes, do not make a step of 1 s one of 12 s."""
    (page,) = shown(tmp_path, state(mean_step_s=1.0, steps_per_s=1 / 12, ago_s=60.0))
    assert figures(page)["a step"] == "1.000 s" and figures(page)["last step"] == "60.0 s ago"


def test_the_ends_of_a_chart_have_the_ages_of_its_own_points(tmp_path: Path) -> None:
    (page,) = shown(tmp_path, state())
    assert page["texts"]["times"][-2:] == ["step 38, 66.0 s ago", "step 40, 60.0 s ago"]
    assert page["texts"]["losses"][-2:] == ["step 39, 63.0 s ago", "step 40, 60.0 s ago"]


def test_a_launcher_that_does_not_answer_is_no_job_that_trains(tmp_path: Path) -> None:
    there, gone, back = shown(tmp_path, state(), None, state())
    for page in (there, back):
        assert page["texts"]["state"] == ["training"] and not page["outdated"] and not page["texts"].get("news")
    assert gone["texts"]["state"] == ["no answer"] and gone["outdated"] and "no answer" in gone["title"]
    assert gone["texts"]["news"] == ["The launcher does not answer: the job may have ended."]
    assert there["title"] == back["title"] != gone["title"]
