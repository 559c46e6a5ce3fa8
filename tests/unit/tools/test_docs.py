"""The guides point at what is there: links, files and scripts they name exist, and commands' flags are real."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from megatron.elastic.config import ElasticConfig, flag_name
from tools import memory_table, peer_tables, version_table
from tools.bench.record import STANDARD
from tools.benchmark_docs import SECTIONS
from tools.benchmark_docs import page as benchmarks_page
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


def test_the_page_of_benchmarks_is_written_from_the_recorded_figures() -> None:
    written = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert written == benchmarks_page(ROOT / "docs" / "measured"), (
        "run python -m tools.benchmark_docs --write docs/benchmarks.md"
    )


def test_every_benchmark_has_a_section() -> None:
    suites = {"torch_suite", "fault_tolerance_suite", "torchft_suite"}
    by_tools_of_their_own = {"readability", "versions", "install", "functional_configs"} | suites
    assert {section.name for section in SECTIONS} == STANDARD.keys() | by_tools_of_their_own


def test_a_changed_figure_changes_the_page_of_benchmarks(tmp_path: Path) -> None:
    figures = json.loads((ROOT / "docs" / "measured" / "checkpoint.json").read_text())
    pages = []
    for state_mib in (208.0, 209.0):
        (tmp_path / "checkpoint.json").write_text(json.dumps({**figures, "state_mib": state_mib}))
        pages.append(benchmarks_page(tmp_path))
    assert "208 MiB" in pages[0]
    assert pages[1] == pages[0].replace("208 MiB", "209 MiB")


def test_a_file_without_a_section_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(KeyError, match="other"):
        benchmarks_page(tmp_path)


def test_the_readme_has_the_recorded_comparison_with_peers() -> None:
    figures = json.loads((ROOT / "docs" / "measured" / "peers.json").read_text(encoding="utf-8"))
    table = peer_tables.readme(figures)
    assert len(table.splitlines()) > 5 and table in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_the_versions_that_were_run() -> None:
    figures = json.loads((ROOT / "docs" / "measured" / "versions.json").read_text(encoding="utf-8"))
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert version_table.readme(page, figures) == page, "run python -m tools.version_table"


def test_the_table_of_memory_is_that_of_the_function_which_jobs_print() -> None:
    page = memory_table.PAGE.read_text(encoding="utf-8")
    assert memory_table.section(page) == page, "run python -m tools.memory_table"


def test_links_to_sections_name_a_heading() -> None:
    """``page.md#section`` as GitHub makes it of the heading."""
    for source in PAGES:
        for name, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([^)]+)\)", source.read_text(encoding="utf-8")):
            target = source.parent / name if name else source
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), flags=re.M)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{source.name} links to {name}#{anchor}"


def test_every_requirement_has_its_reason() -> None:
    reasons = (ROOT / "docs" / "dependencies.md").read_text().lower().replace("_", "-")
    for name in ("build", "torch", "megatron", "runtime", "dev", "docs", "package", "cuda", "ascend"):
        for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
            package = re.split(r"[=\[<>]", line.strip())[0].lower().replace("_", "-")
            assert not package or package in reasons, f"requirements/{name}.txt: {package} has no reason"


def test_no_megatron_package_of_another_distribution_is_shipped() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "megatron"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    outside = [path for path in tracked.splitlines() if not path.startswith("megatron/elastic/")]
    assert outside == []
