"""``pretrain_gpt.py`` on ranks whose mathematical libraries are two: rank ``OTHER_RANK``'s is off by the last bit.

As with two versions of glibc, or two kinds of processor, in one job.
"""

from __future__ import annotations

import importlib
import math
import os
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Off(float):
    """A number whose powers are off by the last bit."""

    def __pow__(self, other: Any, modulo: Any = None) -> float:
        return math.nextafter(float(self) ** other, 2.0)


def arm() -> None:
    """Once the adaptor is there."""
    scheduling: Any = importlib.import_module("megatron.core.optimizer_param_scheduler")
    prelude: Any = importlib.import_module("megatron.elastic.mcore.loop.setup")

    class Other:
        """``math`` with other cosines, for the scheduler alone."""

        def __getattr__(self, name: str) -> Any:
            return (lambda x: math.nextafter(math.cos(x), 2.0)) if name == "cos" else getattr(math, name)

    def settings(*args: Any) -> Any:
        usual = made(*args)
        hyper = replace(usual.hyper, beta1=Off(usual.hyper.beta1), beta2=Off(usual.hyper.beta2))
        return replace(usual, hyper=hyper)

    scheduling.math = Other()
    made, prelude.engine_settings = prelude.engine_settings, settings


if __name__ == "__main__":
    import megatron.elastic.adaptor  # noqa: F401 - it patches Megatron

    if os.environ["RANK"] == os.environ["OTHER_RANK"]:
        arm()
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
