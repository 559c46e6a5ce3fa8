"""Pytest's root: lets tests import ``pretrain_gpt`` and ``tools`` from the checkout, one thread per process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = str(Path(__file__).resolve().parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

pytest_plugins = ["tests.scheduling"]
