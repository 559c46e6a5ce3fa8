"""The guides point at what is there: links, files and scripts they name exist, and commands' flags are real."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from megatron.elastic.config import ElasticConfig, flag_name
from tools.simulation_docs import rewritten, sections

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
FOLDERS = ("megatron/", "scripts/", "tools/", "docs/", "tests/", "csrc/", "requirements/")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    missing = [target for target in links if target and not (page.parent / target).exists()]
    named = [word.rstrip(".,:;") for word in re.findall(r"`([\w./-]+)`", text)]
    missing += [word for word in named if word.startswith(FOLDERS) and not (ROOT / word).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_elastic_flags_that_a_page_names_exist(page: Path) -> None:
    known = {"--elastic", *(flag_name(name) for name in ElasticConfig.field_names())}
    known |= {flag.replace("--elastic-", "--no-elastic-") for flag in known}
    found = set(re.findall(r"--(?:no-)?elastic(?:-[a-z]+)*", page.read_text(encoding="utf-8")))
    assert found - known <= {"--elastic-"}, sorted(found - known)


def test_figures_of_the_simulators_page_are_the_recorded_ones() -> None:
    page = (ROOT / "docs" / "simulation.md").read_text()
    assert rewritten(page, sections(ROOT / "docs" / "measured")) == page, "run python tools/simulation_docs.py"


def test_every_requirement_has_its_reason() -> None:
    reasons = (ROOT / "docs" / "dependencies.md").read_text().lower().replace("_", "-")
    for name in ("build", "torch", "megatron", "runtime", "dev", "cuda", "ascend"):
        for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
            package = re.split(r"[=\[<>]", line.strip())[0].lower().replace("_", "-")
            assert not package or package in reasons, f"requirements/{name}.txt: {package} has no reason"


def test_no_megatron_package_of_another_distribution_is_shipped() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "megatron"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    outside = [path for path in tracked.splitlines() if not path.startswith("megatron/elastic/")]
    assert outside == []
