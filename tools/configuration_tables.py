"""docs/configurations.md: which configurations of Megatron-LM run under ``--elastic``, and what each example loses.

    python -m tools.configuration_tables      # write the page anew

The first part is ``docs/measured/functional_configs.json``, which ``python -m tools.functional_configs`` records. The
second is computed from the flags of :mod:`tools.example_arguments` by the check of every start.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.elastic.config import ElasticConfig
from megatron.elastic.mcore.args import substitutions, support
from megatron.elastic.mcore.args.arguments import add_arguments
from megatron.elastic.mcore.args.bad_input import BadInput
from tools.example_arguments import EXAMPLES, Example

__all__ = ["counts", "example_table", "functional_tables", "losses_of", "page"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configurations.md"
RECORD = ROOT / "docs" / "measured" / "functional_configs.json"
PLATFORM = "cuda"


# ---------------------------------------------------------------- examples


def losses_of(example: Example) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what a start of ``example`` with ``--elastic`` on GPUs refuses, and the flags that have no effect."""
    words = ["--elastic", *example.arguments]
    args = _parsed(words, example.ranks)
    try:
        support.check(args, ElasticConfig(), PLATFORM, words)
        refused: tuple[str, ...] = ()
    except BadInput as faults:
        refused = tuple(faults.texts)
    machine = substitutions.Installed.detect(PLATFORM)
    unused = substitutions.substitute(args, machine, substitutions.ELASTIC_ROWS)
    given = {word.partition("=")[0] for word in words}
    return refused, tuple(change.row.flag for change in unused if change.row.flag.split()[0] in given)


def _parsed(words: Sequence[str], ranks: int) -> Namespace:
    """Return the arguments as Megatron's parser reads them on ``ranks`` ranks, not validated."""
    from megatron.training.arguments import add_megatron_arguments  # slow, and the page of benchmarks needs counts only

    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    parsed = parser.parse_args(words)
    parsed.world_size = ranks
    return parsed


def example_table() -> list[str]:
    """Return a line for each example."""
    lines = ["| model | settings | ranks | refused | accepted without effect |", "|---|---|---|---|---|"]
    for example in EXAMPLES:
        refused, unused = losses_of(example)
        cells = (example.model, example.source, str(example.ranks), "<br>".join(refused) or "nothing", _flags(unused))
        lines.append(_line(cells))
    return lines


def _flags(flags: Iterable[str]) -> str:
    return " ".join(f"`{flag}`" for flag in flags) or "none"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


# ---------------------------------------------------------------- functional tests


def counts(figures: Mapping[str, Any]) -> str:
    """Return a line for each outcome with its number of configurations."""
    rows = figures["configurations"]
    found = Counter(_outcome(row) for row in rows)
    others = Counter(figures["other_scripts"].values())
    compared = [row["deviation"] for row in rows if row["status"] == "ran"]
    largest = f"Largest relative deviation of a loss from plain Megatron's: {max(compared):.0e}." if compared else ""
    lines = ["| configurations | number |", "|---|---|"]
    lines += [_line((f"not counted: {why}, of another script", str(count))) for why, count in sorted(others.items())]
    for status, name in (
        ("ran", "ran, with one rank killed that returned: no step lost, the losses of plain Megatron"),
        ("plain failed", "ran so, but plain Megatron's run failed, so losses are not compared"),
        ("neither", "neither runs at this size, plain Megatron nor --elastic"),
        ("failed", "failed"),
        ("not run", "nothing refused, not run"),
        (
            "refused, not on a CPU",
            "refused; plain Megatron does not run it here either, at this size and with these tokens",
        ),
        ("refused", "refused; plain Megatron runs it on a CPU, or was not tried"),
    ):
        lines.append(_line((name, str(found[status]))))
    tried = sum(found[status] for status in ("ran", "plain failed", "failed", "refused"))
    ran = found["ran"] + found["plain failed"]
    lines += ["", f"Of those tried that a CPU can run at all, {_percent(ran, tried)} ran."]
    return "\n".join([*lines, "", largest or "No losses were compared yet."])


def _outcome(row: Mapping[str, Any]) -> str:
    """Return the status of a row; refused ones apart by whether plain Megatron runs them on a CPU."""
    alone = row["status"] == "refused" and row.get("plain", "") not in ("", "ran")
    return "refused, not on a CPU" if alone else str(row["status"])


def _percent(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "none"


def functional_tables(figures: Mapping[str, Any]) -> list[str]:
    """Return counts, refusals by their number, and a line for each configuration."""
    rows = figures["configurations"]
    lines = [counts(figures), "", "### Why are configurations refused?", "", *_refusals(rows), ""]
    lines += ["### Each configuration", "", "| configuration | ranks | | largest deviation of a loss, or why not |"]
    return [*lines, "|---|---|---|---|", *(_line(_cells(row)) for row in rows)]


def _refusals(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each reason: how many configurations have it, and how many have no other."""
    found, alone = Counter[str](), Counter[str]()
    for row in rows:
        reasons = {re.sub(r"\d+", "N", line.partition(":")[0]) for line in row["refused"]}
        found.update(reasons)
        alone.update(reasons if len(reasons) == 1 else ())
    lines = ["| reason | configurations | this alone |", "|---|---|---|"]
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return lines + [_line((reason, str(count), str(alone[reason]))) for reason, count in ordered]


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    result = f"{row['deviation']:.0e}" if row["status"] == "ran" else row["failure"]
    if row["status"] == "refused":
        result = ", ".join(sorted({line.split()[0] for line in row["refused"]}))
        if row.get("plain"):
            result += f"; plain Megatron: {row['plain']}"
    return row["name"], str(row["ranks"]), row["status"], result


HEAD = """# Which configurations run?

Written by `python -m tools.configuration_tables`.

## Megatron-LM's functional tests

The configurations of `tests/functional_tests/test_cases/{gpt,moe}` of release 0.17.1, made small enough for a CPU by
`python -m tools.functional_configs`, with Megatron-LM's own `pretrain_gpt.py`, unmodified. Parallel sizes and features
stay; widths, layers, sequence, batch and steps are smaller, there are at most 8 ranks, tokens are random, dropout is
off, and a test that resumes is run as its first half. Most train in bf16, where losses differ more after another order
of additions than in fp32. `docs/measured/functional_configs.json` has each line.

The run of plain Megatron that losses are compared with saves nothing and injects no errors of its own. Its layers for
CPUs have no context parallelism, so there fewer ranks train the same batch, each with the whole sequence and all
experts, and both runs begin with the weights of one checkpoint. Where ranks cut experts, it has Megatron's allgather
dispatcher: the other one gathers unequal tensors, which gloo does not.
"""

EXAMPLES_HEAD = """
## Example scripts: what does each lose?

The flags of each (`tools/example_arguments.py`) through the check of every start, for GPUs. None of them was trained
here, and nothing was ever trained on a GPU.
"""


def page(figures: Mapping[str, Any]) -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *functional_tables(figures), EXAMPLES_HEAD, *example_table()]) + "\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
