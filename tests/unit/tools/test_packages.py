"""The packages' metadata is one that an index takes; ``tests/integration/test_installed_wheel.py`` builds them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.elastic import command

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_no_requirement_names_a_repository(project: dict[str, Any]) -> None:
    """An index refuses direct references."""
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *(line for lines in extras.values() for line in lines)]
    assert [line for line in wanted if "@" in line or "://" in line] == []


def test_what_is_bound_to_a_release_has_an_upper_bound(project: dict[str, Any]) -> None:
    wanted = project["project"]["dependencies"]
    for name in ("torch", "megatron-core"):
        assert any(re.match(rf"{name}>=[\d.]+,<[\d.]+", line) for line in wanted), name
    assert "<" in project["project"]["requires-python"]


def test_every_file_that_the_wheel_carries_is_there(project: dict[str, Any]) -> None:
    for folder, patterns in project["tool"]["setuptools"]["data-files"].items():
        assert folder.startswith("share/megatron-elastic")
        assert all(list(ROOT.glob(pattern)) for pattern in patterns), (folder, patterns)


def metadata(folder: Path, repository: str) -> Message:
    """The wheel's metadata, as the build backend writes it where ``MEGATRON_ELASTIC_URL`` is ``repository``."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "megatron_elastic_torch.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "csrc").mkdir(exist_ok=True)
    hook = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", hook],
        cwd=folder,
        env={**os.environ, "MEGATRON_ELASTIC_URL": repository},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return message_from_bytes((folder / done.stdout.splitlines()[-1] / "METADATA").read_bytes())


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_an_index_shows_links_into_the_version_where_the_repository_is_known(tmp_path: Path) -> None:
    page = metadata(tmp_path, "https://example.org/owner/name/")
    root, version = "https://example.org/owner/name", page["Version"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = links(str(page.get_payload()))
    assert len(shown) == len(links(readme)) > 10 and all(link.startswith("https://") for link in shown)
    ours = [link.removeprefix(root) for link in shown if link.startswith(root)]
    assert f"/raw/v{version}/docs/images/quickstart.png" in ours and f"/blob/v{version}/docs/state.md" in ours
    pages = page.get_all("Project-URL", [])
    assert f"Repository, {root}" in pages and f"Changelog, {root}/blob/v{version}/CHANGELOG.md" in pages
    targets = [link for link in [*ours, *(entry.partition(root)[2] for entry in pages)] if f"/v{version}/" in link]
    assert [link for link in targets if not (ROOT / link.partition(f"/v{version}/")[2]).is_file()] == []


def test_an_index_shows_no_broken_link_where_the_repository_is_not_known(tmp_path: Path) -> None:
    page = metadata(tmp_path, "")
    assert [link for link in links(str(page.get_payload())) if not link.startswith("https://")] == []
    assert "How does it work? | how-it-works.md on one page" in str(page.get_payload())
    assert page.get_all("Project-URL") is None


def test_the_release_workflow_names_its_own_repository() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/packages.yml").read_text())["jobs"].values()
    assert job["env"]["MEGATRON_ELASTIC_URL"] == "${{ github.server_url }}/${{ github.repository }}"


def test_the_console_command_is_installed_by_name_and_refuses_other_words(
    project: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert project["project"]["scripts"] == {"megatron-elastic": "megatron.elastic.command:main"}
    assert command.main(["lunch"]) == 1
    assert capsys.readouterr().err == "error: lunch: choose check, ctl, files, launch, simulate\n"
    assert command.main(["files"]) == 0
    assert Path(capsys.readouterr().out.strip(), "pretrain_gpt.py").is_file()


def test_definitions_of_ci_and_templates_are_valid_yaml_and_run_scripts_that_exist() -> None:
    found = sorted((ROOT / ".github").rglob("*.yml"))
    assert len(found) >= 4
    for path in found:
        text = path.read_text(encoding="utf-8")
        assert isinstance(yaml.safe_load(text), dict), path
        for script in re.findall(r"run: bash (\S+)", text):
            assert (ROOT / script).is_file(), f"{path.name}: {script}"
