"""Pages of the documentation site that are made when it is built (a hook of mkdocs, ``mkdocs.yml``).

    index.md          README.md
    contributing.md   CONTRIBUTING.md
    api/NAME.md       one page a package of megatron/elastic: its modules, for mkdocstrings

On the other pages a link whose text is the name of a file gets the title of that page as its text. Paths of modules
become links to the API, and so do the names of the glossary, as far as the API has them. Within the design, numbers of
sections are links.

Code is not imported, so the site can be built without torch and Megatron.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron" / "elastic"
COPIED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""Files in the root of the repository that are pages of the site."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of the API to the navigation."""
    assert config.nav is not None
    config.nav.append({"API": navigation()})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    for source, page in COPIED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=inside_docs(text)))
    files.append(File.generated(config, "api/index.md", content=overview()))
    for name in packages():
        files.append(File.generated(config, f"api/{name}.md", content=package_page(name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name pages by their titles, and link names of modules."""
    if page.file.src_uri.startswith("api/"):
        return markdown
    blocks = re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)
    blocks[::2] = [linked(text) for text in blocks[::2]]
    if page.file.src_uri == "glossary.md":
        blocks = [re.sub(r"\| `([\w.]+)` \|", glossary_link, text) for text in blocks]
    return "".join(blocks)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link the numbers of sections within the design."""
    if page.file.src_uri != "design.md":
        return html
    headings = [
        heading for chapter in page.toc for top in (chapter, *chapter.children) for heading in (top, *top.children)
    ]
    return sections_linked(html, {heading.title.split(" ")[0].rstrip("."): heading.id for heading in headings})


def sections_linked(html: str, anchors: Mapping[str, str]) -> str:
    """``html`` with a link at each ``§3.5`` of a text. ``anchors``: number of a section → anchor of its heading."""

    def link(match: re.Match[str]) -> str:
        number = match[3]
        return match[0] if number not in anchors else f'<a href="#{anchors[number]}">§{number}</a>'

    return re.sub(r"(<(a|code|h[1-6])\b.*?</\2>)|§(\d+(?:\.\d+)?)", link, html, flags=re.S)


def linked(text: str) -> str:
    """``text`` (without code blocks) with titles of pages, links to modules, and flags marked for the style sheet."""
    text = re.sub(r"\[(?:docs/)?([\w-]+)\.md\](?=\()", lambda match: f"[{title(match[1])}]", text)
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if not line.startswith("#"):
            line = re.sub(r"(?<!\[)`([a-z_][\w/.]*)`(?!\])", lambda match: module_link(match[1]), line)
            lines[number] = re.sub(r"(`--[\w-]+`)", r"\1{.flag}", line)  # not to be broken at its hyphens
    return "\n".join(lines)


def module_link(name: str) -> str:
    """``name`` as code; a link where it is the path of a public module or package (``state/pool.py``)."""
    path = name.removeprefix("megatron/elastic/").rstrip("/")
    public = path and not any(part.startswith("_") for part in path.split("/"))
    here = PACKAGE / path
    if public and here.is_file() and here.suffix == ".py":
        return f"[`{name}`][megatron.elastic.{path.removesuffix('.py').replace('/', '.')}]"
    if public and name.endswith("/") and (here / "__init__.py").is_file():
        return f"[`{name}`][megatron.elastic.{path.replace('/', '.')}]"
    return f"`{name}`"


def glossary_link(match: re.Match[str]) -> str:
    """A cell with a name in code, as a link that is left out where the API does not show the name."""
    name = match[1]
    return f'| <autoref optional identifier="megatron.elastic.{name}"><code>{name}</code></autoref> |'


@cache
def title(name: str) -> str:
    """The heading of the page ``docs/NAME.md``, or of the one of that name in the root of the repository."""
    path = next(path for path in (ROOT / "docs" / f"{name}.md", ROOT / f"{name}.md") if path.exists())
    heading = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), flags=re.M)
    assert heading is not None, f"{path} has no heading"
    return heading[1]


def inside_docs(text: str) -> str:
    """``text`` of a page in the root of the repository, with its links as seen from ``docs/``."""
    for source, page in COPIED.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text.replace("](docs/", "](")


def packages() -> list[str]:
    """Packages below ``megatron.elastic``, dotted, in alphabetical order; a package comes before those inside."""
    found = (path.parent.relative_to(PACKAGE).parts for path in PACKAGE.rglob("__init__.py"))
    return [".".join(parts) for parts in sorted(found) if parts]


def modules(name: str) -> list[str]:
    """Public modules of the package ``name`` (empty: of ``megatron.elastic``), in alphabetical order."""
    files = PACKAGE.joinpath(*name.split(".")).glob("*.py")
    return sorted(path.stem for path in files if not path.stem.startswith("_"))


def navigation() -> list[object]:
    """Pages of the API: one section a folder, with the packages inside it below."""
    sections: dict[str, list[object]] = {}
    for name in packages():
        sections.setdefault(name.split(".")[0], []).append({name: f"api/{name}.md"})
    pages = [section[0] if len(section) == 1 else {name: section} for name, section in sections.items()]
    return ["api/index.md", *pages]


def overview() -> str:
    """The first page of the API: packages with the first line of their docstrings, and modules outside of packages."""
    lines = ["# API", "", "From the docstrings. Every package of `megatron/elastic` has a page.", ""]
    lines += ["| package | |", "|---|---|"]
    for name in packages():
        document = ast.get_docstring(ast.parse(PACKAGE.joinpath(*name.split("."), "__init__.py").read_text("utf-8")))
        lines.append(f"| [{name}]({name}.md) | {first_line(document or '')} |")
    lines += ["", *(line for module in modules("") for line in (f"::: megatron.elastic.{module}", ""))]
    return "\n".join(lines)


def first_line(docstring: str) -> str:
    """The first line of a docstring, with references as code and without the section of the design."""
    return re.sub(
        r":\w+:`~?([^`]+)`| \(docs/design\.md [^)]*\)",
        lambda match: f"`{match[1]}`" if match[1] else "",
        docstring.splitlines()[0],
    )


def package_page(name: str) -> str:
    """The page of one package."""
    full = f"megatron.elastic.{name}"
    head = f"::: {full}\n    options: {{heading_level: 1, members: false, show_root_full_path: true}}\n"
    return "\n".join([head, *(f"::: {full}.{module}\n" for module in modules(name))])
