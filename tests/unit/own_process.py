"""Scripts of tests that need a process of their own: Megatron's global state is set once a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["result_of"]

ROOT = Path(__file__).resolve().parents[2]


def result_of(script: Path, folder: Path, seconds: float = 300.0) -> Any:
    """Run ``script FILE`` on one thread and return what it wrote to the file, as JSON."""
    out = folder / "answers.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(out)],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())
