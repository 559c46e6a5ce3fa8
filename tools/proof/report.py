"""The report of a proof: one JSON file, and the same as Markdown."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.proof.sections import SECTIONS

__all__ = ["write"]

_VERDICTS = {True: "passed", False: "**failed**", None: "not possible here"}


def write(report: Mapping[str, Any], folder: Path) -> None:
    """Write ``report.json`` and ``report.md`` into ``folder``."""
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.md").write_text("\n".join(_lines(report)) + "\n")


def _lines(report: Mapping[str, Any]) -> list[str]:
    lines = [f"# Proof on {report['platform']}", "", f"{report['began']}, {report['seconds']:.0f} s in all.", ""]
    lines += ["| section | verdict | seconds |", "|---|---|---|"]
    for name, found in report["sections"].items():
        lines.append(f"| {name} | {_VERDICTS[found['passed']]} | {found['seconds']:.0f} |")
    for name, found in report["sections"].items():
        about = (inspect.getdoc(SECTIONS[name]) or "").strip()
        lines += ["", f"## {name}", "", about, "", *_shown(found)]
    return lines


def _shown(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, value in found.items():
        if key in ("passed", "seconds") or value in ("", None):
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines += ["", *_table(value), ""]
        elif key == "fault":
            lines += ["", "```", str(value), "```"]
        else:
            lines.append(f"- {key}: {_text(value)}")
    return lines


def _table(rows: list[dict[str, Any]]) -> list[str]:
    names = [name for name in rows[0] if name != "fault" or any(row.get("fault") for row in rows)]
    head = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return head + ["| " + " | ".join(_text(row.get(name)).replace("\n", " ") for name in names) + " |" for row in rows]


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return str(value)
