"""``pretrain_gpt.py`` with a data loader on ``MISREAD_RANK`` that goes wrong once, as ``MISREAD_FAULT`` says.

``stale_batch``   the loader hands out the batch before once more, with that batch's sample numbers
``other_labels``  the data set on this rank has another label in one sample: a file that differs between nodes

A process that took a lost rank's place reads what it should.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from megatron.elastic.control import env
from megatron.elastic.engine.compute.samples import DatasetSource, Numbered, StepAddress, _PieceLoader
from megatron.elastic.plan.model import Piece

ROOT = Path(__file__).resolve().parents[2]
AT = 5
"""The batch that goes wrong, counted from 0; and the sample."""


def stale_batch() -> None:
    """Hand out batch ``AT - 1`` in the place of batch ``AT``."""
    taken: list[Numbered] = []
    original = _PieceLoader.take

    def take(self: _PieceLoader) -> Numbered:
        taken.append(original(self))
        return taken[-2] if len(taken) == AT + 1 else taken[-1]

    _PieceLoader.take = take  # type: ignore[method-assign]


def other_labels() -> None:
    """Change the last label of sample ``AT``."""
    original = DatasetSource._read

    def read(self: DatasetSource, address: StepAddress, piece: Piece) -> Numbered:
        samples, batch = original(self, address, piece)
        if AT in samples:
            batch["labels"][samples.index(AT), -1] += 1
        return samples, batch

    DatasetSource._read = read  # type: ignore[method-assign]


if __name__ == "__main__":
    import megatron.elastic.adaptor  # noqa: F401 - it patches Megatron

    first_life = os.environ[env.INCARNATION] == "0"
    if os.environ["RANK"] == os.environ["MISREAD_RANK"] and first_life:
        {"stale_batch": stale_batch, "other_labels": other_labels}[os.environ["MISREAD_FAULT"]]()
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
