"""``pretrain_gpt.py`` that gives ``pretrain()`` a function for values beside the loss, as scripts may do."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def arm() -> None:
    """Once the adaptor is there."""
    from megatron.training import training

    training.pretrain = functools.wraps(training.pretrain)(
        functools.partial(training.pretrain, non_loss_data_func=values_of)
    )


def values_of(*_: Any) -> None:
    """Megatron calls it in an evaluation, with the model."""
    print("values beside the loss", flush=True)


if __name__ == "__main__":
    import megatron.elastic.adaptor  # noqa: F401 - it patches Megatron

    arm()
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
