"""Pytest's root: lets tests import ``pretrain_gpt`` and ``tools`` from the checkout, one thread per process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = str(Path(__file__).resolve().parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

# Other tests share the cores: how long an example takes tells nothing about it.
settings.register_profile("shared cores", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("shared cores")

pytest_plugins = ["tests.scheduling"]
