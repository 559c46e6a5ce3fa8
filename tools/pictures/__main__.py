"""Draw the pictures of docs/images that come from the code.

    python -m tools.pictures [--write docs/images] [NAME ...]

    packages      layers of megatron/elastic, and the imports that do not follow from others
    imports       table of the imports between any two packages
    recovery      one loss: phases of each rank, entries of the journal
    step-states   states of a rank within a step
    rank-states   standing of a rank in the job

``tests/unit/tools/test_pictures.py`` compares the files with what the code says now.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.pictures.packages import draw_imports, draw_packages
from tools.pictures.recovery import draw_recovery
from tools.pictures.states import draw_rank, draw_step

__all__ = ["PICTURES"]

PICTURES: Mapping[str, Callable[[], str]] = {
    "packages": draw_packages,
    "imports": draw_imports,
    "recovery": draw_recovery,
    "step-states": draw_step,
    "rank-states": draw_rank,
}
"""Name of a file, without ``.svg`` → its text."""


def main() -> None:
    """Write pictures."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--write", type=Path, default=Path("docs/images"), metavar="DIR", help="where they go")
    parser.add_argument("names", nargs="*", choices=[[], *PICTURES], help="which ones; all if none is named")
    options = parser.parse_args()
    for name in options.names or PICTURES:
        (options.write / f"{name}.svg").write_text(PICTURES[name](), encoding="utf-8")


if __name__ == "__main__":
    main()
