"""The table of memory in docs/state.md, by the function that prints a job's own at its start.

python -m tools.memory_table          # write the section anew
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.elastic.state.memory import Training, table
from tools.simulation_docs import rewritten

__all__ = ["CASES", "PAGE", "Case", "section"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "state.md"
SECTION = "memory"


@dataclass(frozen=True)
class Case:
    """A model, and the layout in which it is trained."""

    name: str
    parameters: int
    tensor: int
    pipeline: int
    data: int

    def training(self, on_device: bool) -> Training:
        """Return the figures of one rank, with one mirror and parameters in bf16."""
        share = self.parameters // (self.tensor * self.pipeline)
        return Training(share, self.data, itemsize=2, mirrors=1, on_device=on_device)


def gpt(layers: int, hidden: int, vocabulary: int, positions: int) -> int:
    """Return the parameters of a GPT with biases, learned positions and tied embeddings."""
    layer = 12 * hidden * hidden + 13 * hidden
    return layers * layer + (vocabulary + positions + 2) * hidden


def llama(layers: int, hidden: int, ffn: int, vocabulary: int, heads: int, groups: int) -> int:
    """Return the parameters of a Llama with grouped queries and untied embeddings."""
    attention = 2 * hidden * hidden + 2 * hidden * hidden * groups // heads
    return layers * (attention + 3 * hidden * ffn + 2 * hidden) + (2 * vocabulary + 1) * hidden


CASES = (
    Case("Llama-3 8B", llama(32, 4096, 14336, 128256, 32, 8), tensor=2, pipeline=1, data=8),
    Case("GPT-3 175B", gpt(96, 12288, 50257, 2048), tensor=8, pipeline=8, data=16),
)


def _rows() -> Iterator[str]:
    yield "| model and layout | owners | | device B | host B | device GiB | host GiB |"
    yield "|---|---|---|---|---|---|---|"
    for case in CASES:
        layout = f"{case.name}, TP {case.tensor} × PP {case.pipeline} × DP {case.data}"
        for on_device in (True, False):
            *parts, plain = table(case.training(on_device))
            for name, *values in parts:
                yield f"| {layout} | {'device' if on_device else 'host'} | {name} | {' | '.join(values)} |"
        name, *values = plain
        yield f"| {layout} | | {name} | {' | '.join(values)} |"


def section(page: str) -> str:
    """Return ``page`` with the table."""
    return rewritten(page, {SECTION: "\n".join(_rows())})


def main() -> int:
    """Rewrite docs/state.md."""
    PAGE.write_text(section(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
