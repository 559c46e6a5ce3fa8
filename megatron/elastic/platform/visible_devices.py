"""The devices that a process sees, by their numbers on the machine.

A variable of the environment (CUDA_VISIBLE_DEVICES, ASCEND_RT_VISIBLE_DEVICES) lists them, and torch counts those of
the list from 0. Without it a process sees all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["number_on_machine"]


def number_on_machine(index: int, variable: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the entry of ``variable`` for the device that torch counts as ``index``."""
    visible = environ.get(variable, "")
    return visible.split(",")[index].strip() if visible else str(index)
