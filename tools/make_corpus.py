"""A text corpus that is on every machine with Python: the standard library, as JSON lines.

One document a module: its source, and, where it has any, its docstrings as
prose. Files come in sorted order and nothing depends on the machine's paths,
so the same interpreter gives the same corpus.

    python tools/make_corpus.py --output corpus.jsonl --max-bytes 8000000
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

__all__ = ["docstrings", "documents", "main", "write_corpus"]

LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


def docstrings(source: str) -> str:
    """All docstrings of a module in order of appearance, blank lines between; empty if it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                found.append((getattr(node, "lineno", 0), text))
    return "\n\n".join(text for _, text in sorted(found))


def documents(library: Path) -> Iterator[str]:
    """Sources and docstrings below ``library``, tests left out, in sorted order of relative path."""
    for path in sorted(library.rglob("*.py")):
        if LEFT_OUT & set(path.relative_to(library).parts[:-1]):
            continue
        try:
            source = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few library files are in old encodings on purpose
        if source.strip():
            yield source
        prose = docstrings(source)
        if prose:
            yield prose


def write_corpus(output: Path, max_bytes: int, library: Path) -> tuple[int, int]:
    """Write ``{"text": …}`` lines until ``max_bytes`` of text are reached; (documents, bytes of text).

    The file appears under its name only when it is complete. Raises ValueError if there is nothing to write.
    """
    partial = output.with_name(output.name + ".partial")
    count = size = 0
    with open(partial, "w", encoding="utf-8") as out:
        for text in documents(library):
            length = len(text.encode("utf-8"))
            if size + length > max_bytes:
                continue
            out.write(json.dumps({"text": text}) + "\n")
            count, size = count + 1, size + length
    if count == 0:
        partial.unlink()
        raise ValueError(f"no Python sources below {library}: pass a corpus of your own with --input corpus.jsonl")
    os.replace(partial, output)
    return count, size


def main(argv: list[str] | None = None) -> int:
    """Command line; exit status 1 with one line on bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--max-bytes", type=int, default=8_000_000, help="upper bound on the bytes of text")
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder of sources")
    args = parser.parse_args(argv)
    try:
        count, size = write_corpus(args.output, args.max_bytes, args.library)
    except (OSError, ValueError) as error:
        print(f"make_corpus: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {count} documents, {size} bytes of text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
