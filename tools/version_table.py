"""The table of README and docs/benchmarks.md from ``docs/measured/versions.json``: the versions that were run, and how.

    python -m tools.version_table          # write README's section anew

A cell tells the largest relative deviation of a loss that the run had, or the words of its failure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.simulation_docs import rewritten

__all__ = ["SECTION", "readme", "table"]

ROOT = Path(__file__).resolve().parents[1]
SECTION = "versions"
_CHECKS = ("parity", "kill", "to_plain", "from_plain")


def table(figures: Mapping[str, Any]) -> str:
    """Return one line for each environment that was run."""
    lines = [
        "| megatron-core | Python | torch | as plain Megatron | a kill and a rejoin | kill walk "
        "| checkpoint for plain Megatron | checkpoint of plain Megatron "
        "| checkpoint of another version, as plain Megatron resumes it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in figures["versions"]:
        parity, kill, to_plain, from_plain = (_cell(row["checks"][check]) for check in _CHECKS)
        cells = [row["megatron"], row["python"], row["torch"], parity, kill, _walks(row), to_plain, from_plain]
        lines.append(f"| {' | '.join([*cells, _others(row['name'], figures)])} |")
    return "\n".join(lines)


def _walks(row: Mapping[str, Any]) -> str:
    """Return the kills of a row's walks, and the largest deviation of a loss."""
    walks = row.get("walks", {}).values()
    if not walks:
        return "not walked"
    kills, lost = (sum(walk[name] for walk in walks) for name in ("kills", "lost_steps"))
    return f"{kills} kills, {lost} steps lost, within {max(walk['deviation'] for walk in walks):.0e}"


def _others(name: str, figures: Mapping[str, Any]) -> str:
    """Return the versions whose checkpoints the environment ``name`` resumed, and those that it did not."""
    names = {row["name"]: row["megatron"] for row in figures["versions"]}
    cells = [cell for cell in figures["checkpoints"] if cell["resumed_by"] == name]
    return "; ".join(f"{names[cell['written_by']]}: {_cell(cell['outcome'])}" for cell in cells) or "not run"


def _cell(outcome: Mapping[str, Any]) -> str:
    if outcome["failure"]:
        return f"no ({outcome['failure']})"
    worst = float(outcome["deviation"])
    return "yes, same losses" if worst == 0 else f"yes, within {worst:.0e}"


def readme(page: str, figures: Mapping[str, Any]) -> str:
    """Return README ``page`` with the table of ``figures``."""
    return rewritten(page, {SECTION: table(figures)})


def main() -> int:
    """Rewrite README."""
    figures = json.loads((ROOT / "docs" / "measured" / "versions.json").read_text(encoding="utf-8"))
    path = ROOT / "README.md"
    path.write_text(readme(path.read_text(encoding="utf-8"), figures), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
