"""The command line of a module that writes a page of the documentation."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["write_or_print"]


def write_or_print(module: str, description: str | None, page: Callable[[], str], arguments: Sequence[str]) -> int:
    """Write ``page`` to the PATH of ``--write-docs``, or print it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--write-docs", type=Path, metavar="PATH", help="write the page here")
    path = parser.parse_args(arguments).write_docs
    if path is None:
        print(page(), end="")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(), encoding="utf-8")
    return 0
