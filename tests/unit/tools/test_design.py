"""The design pages agree with the code: cited sections, walks, rules and their mutants, glossary, recipes.

Code is read with ``ast`` (C++ as text), nothing of it is imported.
"""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "megatron" / "elastic"
PAGES = ("design.md", "glossary.md", "extending.md", "how-it-works.md", "state.md", "planning.md", "communicator.md")
OUTSIDE = ("csrc/", "tests/", "tools/", "docs/", "scripts/")
"""Paths that begin so are relative to the repository; all others to the package."""
OTHERS = {"Timers.log", "ProcessGroup"}
"""Names on these pages that are Megatron's or torch's."""
STEPS = {
    "A policy": 2,
    "A communicator backend": 5,
    "A transport of the native communicator": 6,
    "Where does a survivor decide between finishing a step and computing it again?": 3,
}
"""Recipe → the most files that it may have a reader open."""

HEAD = re.compile(r"((?:`[^`]+`(?:, | or )?)+) \(`([\w/]+\.(?:py|cpp|hpp))`\)")
"""Names, and the file that defines them."""


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """The part of a page below ``heading``, up to the next heading of the same level."""
    begin = text.index(f"## {heading}\n") + 3
    return text[begin:].split("\n## ")[0]


def spans(text: str) -> list[str]:
    """Code spans outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))


def file_of(name: str) -> Path:
    return (ROOT if name.startswith(OUTSIDE) else PACKAGE) / name


@cache
def definitions(path: Path) -> frozenset[str]:
    """Names that a module defines: functions, classes, constants, and of classes ``Class.member``."""
    found = set[str]()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        found |= _names(node)
        if isinstance(node, ast.ClassDef):
            members = {name for inner in node.body for name in _names(inner)} | _attributes(node)
            found |= {f"{node.name}.{member}" for member in members}
    return frozenset(found)


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def _attributes(node: ast.ClassDef) -> set[str]:
    """The attributes that methods assign to ``self``."""
    stored = (item for item in ast.walk(node) if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store))
    return {item.attr for item in stored if isinstance(item.value, ast.Name) and item.value.id == "self"}


def defines(path: Path, name: str) -> bool:
    """Return whether the file has ``name``: ``function``, ``Class.member``, or in C++ ``Class::member``."""
    if path.suffix == ".py":
        return name in definitions(path)
    return re.search(rf"\b{re.escape(name)}\s*\(", path.read_text(encoding="utf-8")) is not None


@cache
def everything() -> frozenset[str]:
    """All names that the package, the native code and the model of the protocol define."""
    modules = [*PACKAGE.rglob("*.py"), *ROOT.glob("tests/unit/protocol/*.py")]
    python = {name for path in modules for name in definitions(path)}
    native = [path.read_text(encoding="utf-8") for path in ROOT.glob("csrc/**/*.[ch]pp")]
    return frozenset(
        python
        | {name for text in native for name in re.findall(r"\b\w+::\w+(?=\()", text)}
        | {name for text in native for name in re.findall(r"\bclass (\w+)", text)}
    )


def headings() -> set[str]:
    return set(re.findall(r"^#{2,3} (\d+(?:\.\d+)?)\.? ", page("design.md"), flags=re.M))


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "megatron", "csrc", "tests", "tools"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    paths = [ROOT / line for line in listed.splitlines() if line.endswith((".py", ".cpp", ".hpp", ".h"))]
    return [path for path in paths if path.exists() and path != Path(__file__).resolve()]


def test_every_cited_section_of_the_design_has_its_heading() -> None:
    known, cited, missing = headings(), 0, []
    for path in sources():
        text = re.sub(r"\s*\n\s*(?://|#|\*)?\s*", " ", path.read_text(encoding="utf-8"))
        name = path.relative_to(ROOT)
        assert not re.search(r"\bDESIGN\b", text), f"{name} cites DESIGN: write docs/design.md §N"
        for run in re.findall(r"docs/design\.md((?:,? (?:and )?§[\d.]*\d)*)", text):
            numbers = re.findall(r"[\d.]*\d", run)
            assert numbers, f"{name} cites docs/design.md without a section"
            cited += len(numbers)
            missing += [f"{name}: §{number}" for number in numbers if number not in known]
    assert missing == []
    assert cited > 20


def test_every_step_of_a_walk_names_code_that_exists() -> None:
    text = page("design.md")
    walks = text[text.index("\n## 12. Walks\n") :]
    steps = re.findall(r"^\d+\. (.*)$", walks, flags=re.M)
    assert len(steps) > 60
    assert [step for step in steps if not HEAD.match(step)] == [], "each step begins with a name and its file"
    unknown = []
    for names, file in HEAD.findall(walks):
        path = file_of(file)
        assert path.is_file(), file
        unknown += [f"{name} in {file}" for name in spans(names) if not defines(path, name)]
    assert unknown == []


def test_steps_of_each_walk_are_numbered_in_order() -> None:
    text = page("design.md")
    for walk in re.split(r"\n### 12\.\d ", text[text.index("\n## 12. Walks\n") :])[1:]:
        numbers = [int(number) for number in re.findall(r"^(\d+)\. ", walk, flags=re.M)]
        assert numbers == list(range(1, len(numbers) + 1)), walk.splitlines()[0]


def test_rules_are_numbered_and_each_mutant_of_the_model_is_one() -> None:
    text = page("design.md")
    rules = [int(number) for number in re.findall(r"^\*\*Rule (\d+)\.", text, flags=re.M)]
    assert sorted(rules) == list(range(1, len(rules) + 1))
    model = definitions(ROOT / "tests/unit/protocol/protocol_state.py")
    mutants = {name.removeprefix("Faults.") for name in model if name.startswith("Faults.")}
    assert set(re.findall(r"mutant\s`(\w+)`", text)) == mutants


def test_each_rule_names_the_mutant_or_the_tests_that_show_it() -> None:
    text = page("design.md")
    rules = [int(number) for number in re.findall(r"^\*\*Rule (\d+)\.", text, flags=re.M)]
    table = text[text.index("### 11.1 ") : text.index("\n## 12. ")]
    rows = re.findall(r"^\| (\d+) \| ([\w, ]+) \| (.+) \|$", table, flags=re.M)
    assert [int(number) for number, _, _ in rows] == sorted(rules)
    mutants = definitions(ROOT / "tests/unit/protocol/protocol_state.py")
    for number, where, by in rows:
        named = spans(by)
        in_model = [name for name in named if "::" not in name]
        assert len(in_model) == ("model" in where.split(", ")), f"rule {number}"
        assert all(f"Faults.{mutant}" in mutants for mutant in in_model), f"rule {number}"
        for test in set(named) - set(in_model):
            path, _, name = test.partition("::")
            assert name in definitions(ROOT / path), f"rule {number}: {test}"


def test_every_name_of_the_glossary_exists() -> None:
    rows = re.findall(r"^\| ([^|`]+) \|[^|]*\| `([\w.]+)` \|", page("glossary.md"), flags=re.M)
    assert len(rows) > 60
    missing = [f"{term.strip()}: {name}" for term, name in rows if not _exists(name)]
    assert missing == []
    terms = [term.strip() for term, _ in rows]
    assert sorted(terms) == sorted(set(terms)), "one line a term"


def _exists(dotted: str) -> bool:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        module = PACKAGE.joinpath(*parts[:cut]).with_suffix(".py")
        if module.is_file():
            return cut == len(parts) or ".".join(parts[cut:]) in definitions(module)
    return False


@pytest.mark.parametrize("name", PAGES)
def test_files_and_names_on_the_page_exist(name: str) -> None:
    found = spans(page(name))
    files = [span for span in found if re.fullmatch(r"(?:[\w.-]+/)*[\w.-]+\.(?:py|cpp|hpp|md)", span)]
    places = {span: (file_of(span), ROOT / span, ROOT / "docs" / span) for span in files}
    missing = [span for span, paths in places.items() if not any(path.exists() for path in paths) and not _bare(span)]
    words = [span.split("(")[0] for span in found]
    names = [word for word in words if re.fullmatch(r"[A-Z]\w*[a-z]\w*(?:(?:\.|::)\w+)?", word) and word not in OTHERS]
    missing += [word for word in names if word not in everything() and not hasattr(builtins, word)]
    assert missing == []


def _bare(name: str) -> bool:
    """Return whether it is a file's name without its folder, and there is such a file."""
    return "/" not in name and any(path for place in (PACKAGE, ROOT / "tests") for path in place.rglob(name))


@pytest.mark.parametrize(("recipe", "most"), STEPS.items())
def test_a_recipe_has_few_files_to_open(recipe: str, most: int) -> None:
    steps = re.findall(r"^\d+\. .*(?:\n   .*)*", section(page("extending.md"), recipe), flags=re.M)
    files = {span for step in steps for span in spans(step) if re.fullmatch(r"[\w/]+\.(?:py|hpp|cpp)", span)}
    assert 0 < len(files) <= most
