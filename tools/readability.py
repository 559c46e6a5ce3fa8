"""Figures that go with readable code, for this repository and others beside it.

    python tools/readability.py                      # this checkout
    python tools/readability.py . ../another:folder  # several, a column each; of the second only this folder

Prints a table and, as the last line, one JSON object: checkout → figures, the lists in full. Lengths are in lines; a
function's include its signature and docstring. ``__init__`` and ``__main__`` files are not asked for a test.
``--record docs/measured/readability.json`` keeps the table for ``docs/benchmarks.md``, with the commit of each checkout
but this one.

The part of the style that a program can check: a docstring does not begin with *What*, *Who*, *How* or *Whether*, a
sentence has at most 35 words, names actors (not *nobody* or *whoever*), and has none of the words that mean something
else here than a reader expects.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

__all__ = ["ROOT", "Figures", "faults", "main", "measure", "recorded", "sentences"]

ROOT = Path(__file__).resolve().parent.parent

LONGEST_SENTENCE = 35
AVOIDED = re.compile(
    r"\b(houses?|rooms?|stands? on|homeless|mourn\w*|absolv\w*|desk|couriers?|nursery|neighbou?rs?|seals?|welcome"
    r"|nobody|somebody|everybody|anybody|whoever)\b",
    re.IGNORECASE,
)
OPENINGS = re.compile(r"(What|Who|How|Whether)\b")
DIRECTIVES = re.compile(r"#(!| *(type|noqa|fmt|mypy|ruff|pragma|pylint|isort|shellcheck)\b)")
LEFT_OUT = frozenset({"build", "dist", "node_modules", "__pycache__"})
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef | ast.Module


@dataclass(frozen=True)
class Figures:
    """Counts of one checkout. Shares are between 0 and 1."""

    files: int
    function_lines_median: float
    function_lines_max: int
    file_lines_median: float
    file_lines_max: int
    annotated_arguments: float
    documented_public_functions: float
    files_a_folder_max: int
    sentences: int
    sentences_against_the_style: float
    class_names_used_twice: list[str]
    modules_no_test_imports: list[str]


@dataclass(frozen=True)
class Source:
    """One file: ``path`` is relative to the checkout."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def module(self) -> str:
        """Dotted name; that of a package for its ``__init__``."""
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    @property
    def is_test(self) -> bool:
        return (
            bool({"tests", "test"} & set(self.path.parts[:-1]))
            or self.path.name.startswith(("test_", "conftest"))
            or self.path.name.endswith("_test.py")
        )


def python_files(root: Path) -> list[Path]:
    """Return the files that git tracks, or all of them where ``root`` is no checkout of git."""
    told = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=False)
    if told.returncode == 0 and told.stdout:
        return [Path(name) for name in told.stdout.splitlines() if (root / name).is_file()]
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(path for path in found if not any(p in LEFT_OUT or p.startswith(".") for p in path.parts))


def read(root: Path) -> list[Source]:
    """Read every file that parses."""
    sources = []
    for path in python_files(root):
        try:
            text = (root / path).read_text(encoding="utf-8")
            sources.append(Source(path, text, ast.parse(text)))
        except (SyntaxError, UnicodeDecodeError, ValueError) as error:
            print(f"readability: {root / path} is left out: {error}", file=sys.stderr)
    return sources


def functions(source: Source) -> Iterator[Function]:
    """Yield functions and methods, nested ones too."""
    return (node for node in ast.walk(source.tree) if isinstance(node, Function))


def public_functions(body: Sequence[ast.stmt]) -> Iterator[Function]:
    """Yield functions of a module and methods of its public classes, by their names public."""
    for node in body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)


def arguments(function: Function) -> list[ast.arg]:
    """Return the arguments but ``self`` and ``cls``."""
    given = function.args
    named = [*given.posonlyargs, *given.args]
    if named and named[0].arg in ("self", "cls"):
        named = named[1:]
    return [*named, *given.kwonlyargs, *(extra for extra in (given.vararg, given.kwarg) if extra)]


def docstrings(source: Source) -> Iterator[str]:
    """Yield the docstrings of the module, its classes and functions."""
    for node in ast.walk(source.tree):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield text


def comments(source: Source) -> Iterator[str]:
    """Yield comments; lines that follow each other are one."""
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type != tokenize.COMMENT or DIRECTIVES.match(token.string):
            continue
        if block and token.start[0] != last + 1:
            yield "\n".join(block)
            block = []
        block.append(token.string.lstrip("#").strip())
        last = token.start[0]
    if block:
        yield "\n".join(block)


def sentences(text: str) -> list[str]:
    """Return the sentences of a docstring or comment; examples, tables and lists of terms are no sentences."""
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[*-] )", text):
        lines = paragraph.splitlines()
        if any(line.startswith("    ") or line.lstrip().startswith((">>>", "|", "--", "==")) for line in lines):
            continue
        joined = re.sub(r"\s+", " ", paragraph).strip(" *-")
        found += [part for part in re.split(r"(?<=[.!?])\s+(?=[A-Z`*\"(])", joined) if re.search(r"\w", part)]
    return found


def faults(text: str, docstring: bool = True) -> list[str]:
    """Return the sentences of ``text`` that are against the style."""
    found = sentences(text)
    opening = found[:1] if docstring and OPENINGS.match(text) else []
    return [s for s in found if s in opening or len(s.split()) > LONGEST_SENTENCE or AVOIDED.search(s)]


def told(source: Source) -> list[str]:
    """Return the sentences of ``source`` that are against the style."""
    wrong = [sentence for text in docstrings(source) for sentence in faults(text)]
    return wrong + [sentence for text in comments(source) for sentence in faults(text, docstring=False)]


def imported(source: Source) -> Iterator[str]:
    """Yield every dotted name that an import statement, or the program ``python -m``, may take for a module."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = source.path.parts[: -node.level] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\b\w+(?:\.\w+)+\b", node.value)


def measured(sources: Sequence[Source], package: str) -> list[Source]:
    """Return those below ``package``; where there are none, all that are no tests."""
    code = [source for source in sources if not source.is_test]
    return [source for source in code if source.path.is_relative_to(package)] or code


def share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 1.0


def measure(root: Path, package: str) -> Figures:
    """Count in the checkout at ``root``; tests of the modules below ``package`` are looked for in all of it.

    Raises ValueError if there is no Python file.
    """
    sources = read(root)
    own = measured(sources, package)
    if not own:
        raise ValueError(f"{root}: no Python files")
    lengths = [(f.end_lineno or f.lineno) - f.lineno + 1 for source in own for f in functions(source)] or [0]
    args = [argument for source in own for f in functions(source) for argument in arguments(f)]
    public = [f for source in own for f in public_functions(source.tree.body)]
    names = Counter(n.name for source in own for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef))
    total = sum(len(sentences(text)) for source in own for kind in (docstrings, comments) for text in kind(source))
    bad = sum(len(told(source)) for source in own)
    used = {name for source in sources if source.is_test for name in imported(source)}
    above = "".join(f"{part}." for part in Path(package).parts[:-1])  # such as "src.", which imports do not name
    modules = [source.module for source in own if source.path.name not in ("__init__.py", "__main__.py")]
    return Figures(
        files=len(own),
        function_lines_median=statistics.median(lengths),
        function_lines_max=max(lengths),
        file_lines_median=statistics.median(source.lines for source in own),
        file_lines_max=max(source.lines for source in own),
        annotated_arguments=share(sum(argument.annotation is not None for argument in args), len(args)),
        documented_public_functions=share(sum(ast.get_docstring(f) is not None for f in public), len(public)),
        files_a_folder_max=max(Counter(source.path.parent for source in own).values()),
        sentences=total,
        sentences_against_the_style=share(bad, total) if total else 0.0,
        class_names_used_twice=sorted(name for name, count in names.items() if count > 1),
        modules_no_test_imports=sorted(module for module in modules if not {module, module.removeprefix(above)} & used),
    )


def table(columns: dict[str, Figures]) -> str:
    """Return a row a figure, a column a checkout; of lists their length."""
    rows = [["", *columns]]
    for field in fields(Figures):
        values = [getattr(figures, field.name) for figures in columns.values()]
        rows.append([field.name.replace("_", " "), *(str(len(v) if isinstance(v, list) else v) for v in values)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def recorded(columns: dict[str, Figures], commits: dict[str, str]) -> dict[str, object]:
    """Return a JSON object: the command, checkout → commit, and checkout → figures, of lists their length."""
    counted = {
        name: {key: len(value) if isinstance(value, list) else value for key, value in asdict(figures).items()}
        for name, figures in columns.items()
    }
    command = "python tools/readability.py --record docs/measured/readability.json CHECKOUT..."
    return {"command": command, "commits": commits, "checkouts": counted}


def commit_of(checkout: Path) -> str:
    """Return hash and date of the newest commit; empty for this checkout, whose own commit is not made yet."""
    if checkout == ROOT:
        return ""
    told = subprocess.run(
        ["git", "log", "-1", "--format=%h, %cs"], cwd=checkout, capture_output=True, text=True, check=False
    )
    return told.stdout.strip()


def main(argv: list[str] | None = None) -> int:
    """Command line; exit status 1 and one line for a folder without Python files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "checkouts",
        nargs="*",
        default=[str(ROOT)],
        metavar="CHECKOUT[:FOLDER]",
        help="checkout to measure, and the folder of it with the code (default: this one)",
    )
    parser.add_argument(
        "--package",
        default="megatron/elastic",
        help="folder to measure if the argument names none; all but tests if it is not there (default: %(default)s)",
    )
    parser.add_argument("--tell", action="store_true", help="first print each sentence that is against the style")
    parser.add_argument("--record", type=Path, metavar="FILE", help="also write the table into this JSON file")
    asked = parser.parse_args(argv)
    named = [(Path(path), package or asked.package) for path, _, package in (c.partition(":") for c in asked.checkouts)]
    names = {path: "this repository" if path.resolve() == ROOT else path.resolve().name for path, _ in named}
    try:
        columns = {names[path]: measure(path, package) for path, package in named}
    except (OSError, ValueError) as error:
        print(f"readability: {error}", file=sys.stderr)
        return 1
    for path, package in named if asked.tell else ():
        for source in measured(read(path), package):
            for sentence in told(source):
                print(f"{path / source.path}: {sentence}")
    if asked.record:
        commits = {names[path]: commit_of(path.resolve()) for path, _ in named}
        asked.record.write_text(json.dumps(recorded(columns, commits), indent=1) + "\n", encoding="utf-8")
    print(table(columns))
    print(json.dumps({name: asdict(figures) for name, figures in columns.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
