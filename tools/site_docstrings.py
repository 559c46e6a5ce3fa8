"""Docstrings as the API pages of the documentation site print them (an extension of griffe, ``mkdocs.yml``).

Docstrings refer to names as Sphinx does and to the design by section; mkdocstrings reads them as Markdown. Here
``:class:`Report``` becomes a link to the class, ``docs/design.md §3.5`` one to the section, ``::`` before a block a
colon, and an empty line is put before a list. Attributes without a docstring are left out: those of a dataclass are in
its signature.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe

__all__ = ["Docstrings"]

DESIGN_PAGE = Path(__file__).resolve().parents[1] / "docs" / "design.md"
REFERENCE = re.compile(r":(?:mod|class|meth|func|attr|data|exc):`(~?)([^`]+)`")
SECTIONS = re.compile(r"docs/design\.md((?:,? (?:and )?§[\d.]*\d)+)")


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of ``megatron.elastic`` once all of it is loaded."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Called by griffe with ``megatron``."""
        names = Names(pkg["elastic"])
        for found in names.objects.values():
            if found.docstring is not None:
                found.docstring.value = markdown(found.docstring.value, found, names)
            elif found.is_attribute:
                found.public = False


class Names:
    """The names that a package defines."""

    def __init__(self, package: griffe.Object) -> None:
        self.objects: dict[str, griffe.Object] = {}
        """By path."""
        self._endings: dict[str, list[str]] = {}
        """``a.b.c``, ``b.c``, ``c`` → paths that end so."""
        self._add(package)

    def _add(self, found: griffe.Object) -> None:
        self.objects[found.path] = found
        parts = found.path.split(".")
        for cut in range(len(parts)):
            self._endings.setdefault(".".join(parts[cut:]), []).append(found.path)
        for member in found.members.values():
            if isinstance(member, griffe.Object):
                self._add(member)

    def meant(self, name: str, owner: griffe.Object) -> griffe.Object | None:
        """The object that ``name`` means in the docstring of ``owner``, else None.

        A member of the owner, or of what the owner is in; an import there; the only object so called.
        """
        head, _, rest = name.partition(".")
        scope: griffe.Object | None = owner
        while scope is not None:
            imported = ".".join(part for part in (scope.imports.get(head, ""), rest) if part)
            for path in (f"{scope.path}.{name}", imported):
                if path in self.objects:
                    return self.objects[path]
            scope = scope.parent
        candidates = self._endings.get(name, [])
        return self.objects[candidates[0]] if len(candidates) == 1 else None


def markdown(docstring: str, owner: griffe.Object, names: Names) -> str:
    """A docstring as Markdown, with links."""
    lines: list[str] = []
    for line in docstring.splitlines():
        if line.startswith("- ") and lines and lines[-1] and not lines[-1].startswith(("- ", "  ")):
            lines.append("")
        lines.append(line if line.startswith("    ") else re.sub(r"::$", ":", line))
    text = REFERENCE.sub(lambda match: _reference(match, owner, names), "\n".join(lines))
    return SECTIONS.sub(lambda match: "design" + re.sub(r"§([\d.]*\d)", _section, match[1]), text)


def _reference(match: re.Match[str], owner: griffe.Object, names: Names) -> str:
    """A link; code where no page has the object."""
    short, name = match.groups()
    text = f"`{name.rsplit('.', 1)[-1] if short else name}`"
    target = names.meant(name, owner)
    return text if target is None or not _shown(target) else f"[{text}][{target.path}]"


def _shown(found: griffe.Object) -> bool:
    """True if a page of the API has a heading for it."""
    if any(part.startswith("_") for part in found.path.split(".")):
        return False
    if found.is_attribute and found.docstring is None:
        return False
    return found.is_module or (found.is_public and found.parent is not None and _shown(found.parent))


def _section(match: re.Match[str]) -> str:
    return f"[§{match[1]}][{_anchors()[match[1]]}]"


@cache
def _anchors() -> dict[str, str]:
    """Number of a section of the design → anchor of its heading."""
    headings = re.findall(r"^#{2,3} ((\d+(?:\.\d+)?)\.? .+)$", DESIGN_PAGE.read_text(encoding="utf-8"), flags=re.M)
    return {number: re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading, number in headings}
