"""Each environment of the table of versions loads native modules that were built for its torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tools.versions import ROOT, Environment, Failed, Run, compared, merged, with_walks


def test_another_torch_has_an_environment_a_tree_and_a_row_of_its_own(tmp_path: Path) -> None:
    pinned, newer = Environment(tmp_path, "3.12", "0.17.1"), Environment(tmp_path, "3.12", "0.17.1", torch="2.14.1")
    assert pinned.tree == ROOT and newer.tree != ROOT
    assert newer.variables["PYTHONPATH"] == str(newer.tree)
    assert pinned.interpreter != newer.interpreter
    assert (pinned.name, newer.name) == ("py3.12-0.17.1", "py3.12-0.17.1-torch2.14.1")
    assert newer.tree == Environment(tmp_path, "3.13", "0.19.2", torch="2.14.1").tree, "one clone serves all of a torch"


@pytest.mark.parametrize(("version", "wanted"), [("2.14.1", "torch==2.14.1"), ("", None)])
def test_scripts_install_the_torch_that_is_asked_for_or_the_pin(version: str, wanted: str | None) -> None:
    asked = subprocess.run(
        ["bash", "-c", "source scripts/env.sh && elastic_torch"],
        cwd=ROOT,
        env={**os.environ, "MEGATRON_ELASTIC_TORCH": version},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert asked.strip() == (wanted or (ROOT / "requirements" / "torch.txt").read_text(encoding="utf-8").strip())


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    made = subprocess.run(
        ["bash", "-c", "unset VIRTUAL_ENV; source scripts/env.sh && elastic_env"],
        cwd=ROOT,
        env={**os.environ, "MEGATRON_ELASTIC_VENV": str(tmp_path / "venv"), "MEGATRON_ELASTIC_PYTHON": "python3.99"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 1
    assert made.stderr.splitlines()[-1].startswith("[env] error: MEGATRON_ELASTIC_PYTHON=python3.99 is no Python")
    assert not (tmp_path / "venv").exists()


def test_an_environment_in_a_new_folder_is_locked_while_it_is_made(tmp_path: Path) -> None:
    venv = tmp_path / "new" / "venv"
    made = subprocess.run(
        ["bash", "-c", f"source scripts/env.sh && elastic_locked flock --nonblock {venv}.lock echo free"],
        cwd=ROOT,
        env={**os.environ, "MEGATRON_ELASTIC_VENV": str(venv)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (made.returncode, made.stdout, made.stderr) == (1, "", "")


def test_a_new_row_replaces_that_of_its_environment_only() -> None:
    before = {"versions": [{"name": "a", "torch": "1"}, {"name": "b", "torch": "1"}]}
    rows = merged(before, [{"name": "b", "torch": "2"}], [])["versions"]
    assert rows == [{"name": "a", "torch": "1"}, {"name": "b", "torch": "2"}]


def test_walks_are_kept_in_the_row_of_their_environment_also_when_it_is_checked_anew() -> None:
    before = {"versions": [{"name": "a", "torch": "1"}, {"name": "b", "torch": "1"}]}
    walks = {group: {"kills": 2, "lost_steps": 0, "deviation": 1e-8} for group in ("steps", "recovery")}
    one = with_walks(before, "b", {"steps": walks["steps"]})
    both = with_walks(one, "b", {"recovery": walks["recovery"]})
    rows = merged(both, [{"name": "b", "torch": "2"}], [])["versions"]
    assert rows == [{"name": "a", "torch": "1"}, {"name": "b", "torch": "2", "walks": walks}]
    with pytest.raises(Failed, match="not on record"):
        with_walks(before, "c", walks)


def test_losses_that_differ_or_are_missing_do_not_hold() -> None:
    reference = Run({1: 5.0, 2: 4.0, 3: 3.0})
    assert compared(reference, Run({2: 4.0, 3: 3.0}), after=1).failure == ""
    assert compared(reference, Run({1: 5.0, 2: 4.0, 3: 3.001})).failure == "losses deviate by 3e-04"
    assert compared(reference, Run({2: 4.0})).failure == "steps [1, 3] were not logged"
