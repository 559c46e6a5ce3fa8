"""The releases of megatron-core and torch that this package runs with, and the refusal of others at start.

Outside the range no row of the patch table applies, and training would fail later with an error of another cause.
Invariant: the release of megatron-core is read from the files that are about to be imported, before any of its code
runs. So a checkout in ``PYTHONPATH`` counts, and what pip has installed does not.
"""

from __future__ import annotations

import importlib
import re
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import torch

from megatron.elastic.mcore.args.bad_input import BadInput

__all__ = [
    "PATCHED",
    "TESTED",
    "TESTED_TORCH",
    "between_releases",
    "check_megatron",
    "check_torch",
    "in_range",
    "installed_version",
]

TESTED = ">=0.17.1,<0.20"
"""Releases of megatron-core against whose signatures tests check the patch table (pyproject.toml has the same)."""

MAIN = ">=0.20,<0.21"
"""Versions of commits of Megatron-LM's main branch since those releases: they start, with one line that says so."""

PATCHED = ">=0.17.1,<0.21"
"""Versions to which the patch table applies: :data:`TESTED` and :data:`MAIN`."""

MAIN_COMMIT = "d98e8a64ddf3"
"""The commit of Megatron-LM's main branch that was run (``docs/log.md``)."""

TESTED_TORCH = ">=2.11,<2.16"
"""Releases of torch whose interface for process groups tests check (pyproject.toml has the same)."""

_EXAMPLE = "0.19.2"
"""A release within :data:`TESTED`; Megatron-LM tags it ``core_v0.19.2``."""


def installed_version() -> str:
    """Return the version of the megatron.core in use, e.g. ``"0.17.1"``."""
    package_info = importlib.import_module("megatron.core.package_info")
    return str(package_info.__version__)


def check_megatron(package: ModuleType) -> None:
    """Raise :class:`BadInput` if ``package``, megatron.core before its code has run, is outside :data:`PATCHED`."""
    folder = Path(str(package.__file__)).parent
    version = str(runpy.run_path(str(folder / "package_info.py"))["__version__"])
    if not in_range(version, PATCHED):
        raise BadInput(
            f"megatron-core {version} ({folder.parents[1]}) is outside the tested range {TESTED}: pip install "
            f"'megatron-core{TESTED}', or name a checkout of a release in it, such as core_v{_EXAMPLE}, in PYTHONPATH"
        )


def between_releases(version: str) -> str:
    """Return one line about a version of :data:`MAIN`; empty for a tested release."""
    if not in_range(version, MAIN):
        return ""
    return (
        f"megatron-core {version} is no tested release: of Megatron-LM's main branch commit {MAIN_COMMIT} was run with "
        "this package; compare the losses of the first steps with a run without --elastic"
    )


def check_torch(version: str = torch.__version__) -> None:
    """Raise :class:`BadInput` if torch is outside :data:`TESTED_TORCH`."""
    if not in_range(version, TESTED_TORCH):
        raise BadInput(f"torch {version} is outside the tested range {TESTED_TORCH}: pip install 'torch{TESTED_TORCH}'")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: (0, 17, 1) for ``"0.17.1rc2"``."""
    found = re.match(r"\d+(\.\d+)*", version.strip())
    if found is None:
        raise ValueError(f"not a version: {version!r}")
    numbers = tuple(int(part) for part in found.group().split("."))
    return numbers + (0,) * (3 - len(numbers))


_COMPARE: Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}


def in_range(version: str, versions: str) -> bool:
    """Return whether ``version`` meets every comparison of ``versions``."""
    for clause in versions.split(","):
        operator = next(sign for sign in _COMPARE if clause.strip().startswith(sign))
        if not _COMPARE[operator](_numbers(version), _numbers(clause.strip()[len(operator) :])):
            return False
    return True
