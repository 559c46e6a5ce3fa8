"""The documentation site: it builds without a warning, needs no server but its own, and has all that is public."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import griffe
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from tools.site_docstrings import Docstrings
from tools.site_pages import PACKAGE, ROOT, first_line, inside_docs, linked, modules, packages, sections_linked

pytestmark = pytest.mark.timeout(600)  # the first test waits for the site: 15 s of a core that others may use too
PAGES = ("index", "contributing", *(path.stem for path in (ROOT / "docs").glob("*.md")), *packages())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=560)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_built_and_needs_no_other_server(site: Path) -> None:
    built = {
        path.relative_to(site).with_suffix("").as_posix().removeprefix("api/"): path for path in site.rglob("*.html")
    }
    assert built.keys() >= {*PAGES}
    assert len(built) == len({*PAGES}) + 1, "404.html besides"
    for path in built.values():
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^>]*", path.read_text("utf-8")
        )
        assert loaded == [], path


@pytest.mark.slow
def test_every_public_name_has_its_place_in_the_api(site: Path) -> None:
    anchors = {
        name for path in (site / "api").glob("*.html") for name in re.findall(r'id="([^"]+)"', path.read_text("utf-8"))
    }
    missing, seen = [], 0
    for package in ("", *packages()):
        for module in modules(package):
            path = PACKAGE.joinpath(*package.split("."), f"{module}.py")
            full = ".".join(part for part in ("megatron.elastic", package, module) if part)
            names = [full, *(f"{full}.{name}" for name in documented(path))]
            seen += len(names)
            missing += [name for name in names if name not in anchors]
    assert missing == []
    assert seen > 700


def documented(path: Path) -> list[str]:
    """Classes and functions that a module names in ``__all__``."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    exported = [
        name
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
        for name in ast.literal_eval(node.value)
    ]
    defined = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return [name for name in exported if name in defined]


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("[there](nowhere.md)", "nowhere.md"),
        ("[there](#nowhere)", "nowhere"),
        ("[there](/index.html)", "absolute"),
        ("![there](nowhere.svg)", "nowhere.svg"),
    ],
)
def test_a_broken_link_fails_the_build(
    text: str, finding: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the settings of the real site, without its plugins."""
    with pytest.raises(Abort, match="strict mode"):
        build_pages(tmp_path, {"index.md": f"# Heading\n\n{text}\n"})
    assert finding in caplog.text


def build_pages(folder: Path, pages: dict[str, str]) -> None:
    """Build a site of ``pages``, of which the first is in the navigation."""
    docs = folder / "docs"
    docs.mkdir()
    for name, text in pages.items():
        (docs / name).write_text(text)
    nav = list(pages)[:1]
    build(
        load_config(
            str(ROOT / "mkdocs.yml"),
            strict=True,
            docs_dir=str(docs),
            site_dir=str(folder / "site"),
            nav=nav,
            watch=[],
            plugins=[],
            hooks=[],
        )
    )


def test_a_page_outside_of_the_navigation_fails_the_build(tmp_path: Path) -> None:
    with pytest.raises(Abort, match="strict mode"):
        build_pages(tmp_path, {"index.md": "# Heading\n", "other.md": "# Heading\n"})


def test_pages_without_a_fault_are_built(tmp_path: Path) -> None:
    build_pages(tmp_path, {"index.md": "# Heading\n\n[here](#heading)\n"})
    assert (tmp_path / "site" / "index.html").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see [log.md](log.md)", "see [Log](log.md)"),
        ("see [docs/log.md](log.md#here), [text](log.md)", "see [Log](log.md#here), [text](log.md)"),
        (
            "`state/pool.py` and `comm/`",
            "[`state/pool.py`][megatron.elastic.state.pool] and [`comm/`][megatron.elastic.comm]",
        ),
        ("`megatron/elastic/config.py`", "[`megatron/elastic/config.py`][megatron.elastic.config]"),
        ("`state/none.py`, `simulate/__main__.py`, `pool.py`", "`state/none.py`, `simulate/__main__.py`, `pool.py`"),
        ("### In `state/pool.py`, `--load`", "### In `state/pool.py`, `--load`"),
        ("`--load` and `--a b`", "`--load`{.flag} and `--a b`"),
    ],
)
def test_names_on_pages_become_links(text: str, expected: str) -> None:
    assert linked(text) == expected


def test_numbers_of_sections_become_links_in_texts_only() -> None:
    html = '<h2 id="x">§3.5</h2> (§3.5, §9) <code>docs/design.md §3.5</code> <a href="#y">§3.5</a>'
    there = {"3.5": "35-recovery"}
    assert sections_linked(html, there) == html.replace("(§3.5,", '(<a href="#35-recovery">§3.5</a>,')


@pytest.mark.slow
def test_every_section_that_the_design_cites_is_a_link(site: Path) -> None:
    html = (site / "design.html").read_text(encoding="utf-8")
    article = html[html.index("<article") : html.index("</article>")]
    assert len(re.findall(r'<a href="#[^"]+">§', article)) > 30
    assert re.findall(r".{20}§[\d.]*\d.{9}", re.sub(r"<(a|code|h[1-6])\b.*?</\1>", "", article, flags=re.S)) == []


def test_pages_of_the_root_link_to_pages_of_the_site() -> None:
    text = "[a](docs/log.md#x) ![b](docs/images/c.png) [d](CONTRIBUTING.md) [e](https://example.org/docs/)"
    assert inside_docs(text) == "[a](log.md#x) ![b](images/c.png) [d](contributing.md) [e](https://example.org/docs/)"


def test_a_line_of_the_overview_is_plain_markdown() -> None:
    assert first_line("Makes a :class:`~a.B` (docs/design.md §4).\nMore.") == "Makes a `a.B`."


MODULE = '''"""First line (docs/design.md §3.5, §4).

Grammar::

    kept :class:`Here`

Two points
- :class:`Here`, :meth:`Here.act`, :class:`~megatron.elastic.other.There`
- :class:`There`, :func:`_hidden`, :class:`megatron.elastic._native.Built`, :attr:`Here.bare`
"""

from megatron.elastic.other import There


class Here:
    """Calls :meth:`act`."""

    bare: int

    def act(self) -> None:
        """Acts."""


def _hidden() -> None:
    """Is not shown."""
'''


def test_references_of_docstrings_become_links(tmp_path: Path) -> None:
    folder = tmp_path / "megatron" / "elastic"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "other.py").write_text('class There:\n    """Is elsewhere."""\n')
    (folder / "one.py").write_text(MODULE)
    loaded = griffe.load(
        "megatron", search_paths=[tmp_path], try_relative_path=False, extensions=griffe.Extensions(Docstrings())
    )
    one = loaded["elastic.one"]
    assert one.docstring.value.splitlines() == [
        "First line (design [§3.5][35-recovery-of-a-step], [§4][4-membership]).",
        "",
        "Grammar:",
        "",
        "    kept [`Here`][megatron.elastic.one.Here]",
        "",
        "Two points",
        "",
        "- [`Here`][megatron.elastic.one.Here], [`Here.act`][megatron.elastic.one.Here.act], "
        "[`There`][megatron.elastic.other.There]",
        "- [`There`][megatron.elastic.other.There], `_hidden`, `megatron.elastic._native.Built`, `Here.bare`",
    ]
    assert one["Here"].docstring.value == "Calls [`act`][megatron.elastic.one.Here.act]."
    assert not one["Here.bare"].is_public
