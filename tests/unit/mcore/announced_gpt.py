"""Megatron's GPT whose parameters have no values until a unit is announced, and whose gradients are watched.

    python tests/unit/mcore/announced_gpt.py OUT.json

Written for ``test_announced_units.py``; ranks are forked after one import.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tests.unit.mcore.recut_pipeline import CASES, CUTS, UNITS, Case, Pipeline
from tests.unit.small_gpt import answers_of

# isort: split

import torch

from megatron.elastic.engine.compute.buffers import Arena

NAMES = ("tied", "interleaved, untied, recomputed, bf16", "tp2, sequence parallel, untied")


class Watched:
    """A pipeline of which every unit comes late, and every finished gradient is kept as it was then."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.announced: list[tuple[int, int]] = []
        """(cell, unit) in the order of their first announcement."""
        self.finished: list[tuple[int, int]] = []
        """(cell, unit) in the order in which autograd has filled their gradients."""
        self._then: dict[tuple[int, int], torch.Tensor] = {}

    def run(self, segments: list[tuple[int, int, int]]) -> dict[str, Any]:
        """As :meth:`Pipeline.run`; ``later``: the gradients that changed after they were finished."""
        ports = zip(self.pipeline.ports, self.pipeline.arenas, strict=True)
        with ExitStack() as stack:
            for cell, (port, arena) in enumerate(ports):
                arena.parameters.fill_(float("nan"))
                stack.enter_context(port.announcing(partial(self._comes, cell, arena)))
                units = [unit for unit in arena.held.units if unit < UNITS]
                stack.enter_context(arena.watching(units, partial(self._is_finished, cell, arena)))
            answer = self.pipeline.run(segments)
        later = [key for key, then in self._then.items() if not torch.equal(then, self._gradient(*key))]
        return {**answer, "announced": self.announced, "finished": self.finished, "later": later}

    def _comes(self, cell: int, arena: Arena, unit: int) -> None:
        if (cell, unit) in self.announced:
            return
        self.announced.append((cell, unit))
        for one in (unit, UNITS):  # a weight that units share comes with the first of them
            if (one, 0) in arena.slices:
                where = arena.slices[one, 0]
                arena.parameters[where.start : where.stop].copy_(self.pipeline.values[one])

    def _is_finished(self, cell: int, arena: Arena, unit: int) -> None:
        self.finished.append((cell, unit))
        self._then[cell, unit] = self._gradient(cell, unit).clone()

    def _gradient(self, cell: int, unit: int) -> torch.Tensor:
        arena = self.pipeline.arenas[cell]
        where = arena.slices[unit, 0]
        return arena.gradients[where.start : where.stop]


def compute(case: Case) -> list[dict[str, Any]]:
    """The launch's cut and two others: the expected answer beside the watched one."""
    pipeline, answers = Pipeline(case), []
    for cuts in (None, CUTS[0], (0, UNITS)):
        if cuts is not None:
            pipeline.cut(cuts)
        segments = case.launch if cuts is None else pipeline.segments
        answers.append({"plain": pipeline.run(segments), "watched": Watched(pipeline).run(segments)})
    return answers


if __name__ == "__main__":
    found = [{"case": asdict(case), "ranks": answers_of(case, compute)} for case in CASES if case.name in NAMES]
    Path(sys.argv[1]).write_text(json.dumps(found))
