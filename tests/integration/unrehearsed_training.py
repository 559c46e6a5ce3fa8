"""``pretrain_gpt.py`` whose ranks return without a rehearsal, as where no place in the job is known for their model."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def unrehearsed(*_: Any) -> None:
    """Stand in for ``rehearse``: it returns ``None`` where it computes nothing."""


if __name__ == "__main__":
    import megatron.elastic.adaptor  # noqa: F401 - it patches Megatron

    # isort: split

    from megatron.elastic.runtime import start

    vars(start)["rehearse"] = unrehearsed
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
