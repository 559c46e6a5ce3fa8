"""Vendors' packages as their newest wheels, which tests read names and prototypes from; nothing of them is installed.

They are kept in ``build/wheels``. ``ELASTIC_WHEELS`` names a folder that has them, where pip reaches no index.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

__all__ = ["newest"]

KEPT = Path(__file__).resolve().parents[1] / "build" / "wheels"


def newest(package: str, *flags: str) -> zipfile.ZipFile:
    """The wheel of ``package`` (as pip names it), downloaded at first use. Skips the test only if pip gets none.

    ``flags``: further ones of ``pip download``.
    """
    folder = Path(os.environ.get("ELASTIC_WHEELS") or KEPT)
    pattern = f"{package.replace('-', '_')}-*.whl"
    if "ELASTIC_WHEELS" not in os.environ and not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, *flags, "--dest", str(folder), package], capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            pytest.skip(f"pip gets no wheel of {package}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    found = sorted(folder.glob(pattern))
    if not found:
        pytest.skip(f"ELASTIC_WHEELS holds no wheel of {package}")
    return zipfile.ZipFile(found[-1])
