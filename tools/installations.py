"""Install built wheels, each in an empty environment of the Python that it is for, and record what that took.

    bash scripts/build_packages.sh out/dist       # for each MEGATRON_ELASTIC_PYTHON, in its MEGATRON_ELASTIC_VENV
    python -m tools.installations out/dist/*.whl  # minutes and gigabytes a wheel
    python -m tools.installations                 # write README's sentence anew

``scripts/measure_install.sh`` measures one wheel, and has the installed package train two steps. The result goes to
``docs/measured/install.json``, unless ``--record`` names another file. Rows of Pythons that this call does not name
stay as they were.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tools.bench._common import machine
from tools.bench.record import last_object
from tools.simulation_docs import rewritten

__all__ = ["Installation", "main", "measured", "merged", "python_of", "readme", "sentence", "table"]

ROOT = Path(__file__).resolve().parents[1]
SECTION = "install"


class Failed(RuntimeError):
    """A wheel was not measured; the text is one line for a person."""


@dataclass(frozen=True)
class Installation:
    """One wheel in an empty environment. Sizes in 10^6 bytes; the installed package trained ``trained_steps``."""

    python: str
    torch: str
    megatron: str
    minutes: float
    processor_minutes: float
    download_mb: int
    disk_mb: int
    trained_steps: int

    @property
    def name(self) -> str:
        """The row's key in the record: the minor release of Python."""
        return ".".join(self.python.split(".")[:2])


def python_of(wheel: Path) -> str:
    """Return the Python of a wheel, such as 3.12, from its file name. Raises :class:`Failed` if it names no CPython."""
    found = re.search(r"-cp3(\d+)-cp3\1-[^-]+\.whl$", wheel.name)
    if found is None or not wheel.is_file():
        raise Failed(f"{wheel}: no wheel for one CPython; build one with scripts/build_packages.sh")
    return f"3.{found[1]}"


def measured(wheel: Path) -> Installation:
    """Return what the installation of ``wheel`` took. Raises :class:`Failed` if it does not install or train."""
    command = ["bash", "scripts/measure_install.sh", "--wheel", str(wheel.resolve())]
    chosen = {"MEGATRON_ELASTIC_PYTHON": f"python{python_of(wheel)}"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **chosen},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failed(f"{wheel.name}: {' '.join(command[:3])} ended with exit status {done.returncode}")
    printed = last_object(done.stdout)
    return Installation(**{field.name: printed[field.name] for field in dataclasses.fields(Installation)})


def merged(before: Mapping[str, Any], new: Installation) -> list[dict[str, Any]]:
    """Return the rows with ``new`` in place of that of the same Python, in ascending order of Pythons."""
    rows = [Installation(**row) for row in before.get("rows", ())]
    kept = [row for row in rows if row.name != new.name]
    return [dataclasses.asdict(row) for row in sorted([*kept, new], key=lambda row: int(row.name.split(".")[1]))]


def table(figures: Mapping[str, Any]) -> str:
    """Return one line for each Python."""
    lines = [
        "| Python | torch | megatron-core | minutes | of processor time | downloads (MB) | disk (MB) | steps trained |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in (Installation(**row) for row in figures["rows"]):
        cells = dataclasses.astuple(row)
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines)


def sentence(figures: Mapping[str, Any]) -> str:
    """Return README's sentence about the wheel."""
    parts = [
        f"{row.download_mb / 1000:.1f}, {row.disk_mb / 1000:.1f} and {row.processor_minutes:.1f} "
        f"(Python {row.name}, torch {row.torch})"
        for row in (Installation(**row) for row in figures["rows"])
    ]
    return (
        "The built wheel with all that it needs takes gigabytes to download, gigabytes on disk and processor minutes: "
        f"{'; '.join(parts)} (`python -m tools.installations`)."
    )


def readme(page: str, figures: Mapping[str, Any]) -> str:
    """Return README ``page`` with the sentence of ``figures``."""
    return rewritten(page, {SECTION: sentence(figures)})


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.installations", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL", help="made by scripts/build_packages.sh")
    parser.add_argument("--record", type=Path, default=ROOT / "docs" / "measured" / "install.json", metavar="FILE")
    parser.add_argument(
        "--readme", type=Path, default=ROOT / "README.md", metavar="PAGE", help="its sentence is rewritten"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each wheel, record it, write the sentence; 1 if a wheel failed."""
    args = parse(arguments)
    failed = 0
    for wheel in args.wheels:
        try:
            new = measured(wheel)
        except Failed as failure:
            print(f"error: {failure}", file=sys.stderr)
            failed = 1
            continue
        before = json.loads(args.record.read_text(encoding="utf-8")) if args.record.is_file() else {}
        figures = {
            "rows": merged(before, new),
            "machine": dataclasses.asdict(machine()),
            "command": "python -m tools.installations out/dist/*.whl",
            "date": date.today().isoformat(),
        }
        args.record.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if args.record.is_file():
        figures = json.loads(args.record.read_text(encoding="utf-8"))
        args.readme.write_text(readme(args.readme.read_text(encoding="utf-8"), figures), encoding="utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main())
