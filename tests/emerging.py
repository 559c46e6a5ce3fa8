"""The package emerging-optimizers, over which Megatron-core 0.17 builds its Muon, for tests that compare with it.

Its 0.3.0 declares Python 3.12 for one name of ``typing``, which older interpreters are given here. Its kernels in
Triton, which a CPU does not run, are left out where Triton is not installed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.wheels import newest

_OVERRIDE = "import typing\nimport typing_extensions\ntyping.override = typing_extensions.override\n"


def unpacked(folder: Path) -> Path:
    """Return ``folder`` with the package in it, for PYTHONPATH. Skips the test where pip gets none."""
    with newest("emerging-optimizers", "--ignore-requires-python") as content:
        content.extractall(folder)
    if importlib.util.find_spec("triton") is None:
        (folder / "emerging_optimizers/triton_kernels/__init__.py").write_text("HAS_TRITON_340 = False\n")
    (folder / "sitecustomize.py").write_text(_OVERRIDE)
    return folder
