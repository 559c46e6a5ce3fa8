"""Stand-in for Weights & Biases, which is not installed here: what Megatron calls, written down line by line.

Each call is one JSON line in ``$WANDB_CALLS/<rank>-<pid>.jsonl``. As in wandb, ``init`` takes the run from
``WANDB_RUN_ID`` and ``WANDB_RESUME`` when its arguments do not name one, and there is no run after ``finish``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

run: SimpleNamespace | None = None


def _note(call: str, **fields: Any) -> None:
    path = Path(os.environ["WANDB_CALLS"], f"{os.environ['RANK']}-{os.getpid()}.jsonl")
    with path.open("a") as file:
        file.write(json.dumps({"call": call, "rank": int(os.environ["RANK"]), **fields}) + "\n")


def init(dir: str, name: str, project: str, config: dict[str, Any], entity: str | None = None) -> None:
    """Megatron's arguments, by keyword."""
    global run
    assert run is None, "a run is open already"
    run = SimpleNamespace(id=os.environ.get("WANDB_RUN_ID"), entity=entity, project=project)
    _note("init", id=run.id, resume=os.environ.get("WANDB_RESUME"), project=project, rank_of_args=config["rank"])


def log(data: dict[str, Any], step: int | None = None) -> None:
    """Values of one step; wandb drops what is older than the newest."""
    assert run is not None, "logged without a run"
    for key, value in data.items():
        _note("log", key=key, step=step, value=float(value))


def finish() -> None:
    """The run ends here."""
    global run
    run = None
    _note("finish")


config = SimpleNamespace(update=lambda values: _note("config", values=values))
