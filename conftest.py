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

# Other tests share the cores: how long an example takes tells nothing about it. Fewer examples than usual and one seed
# for every run, so that what fails, fails again; "exploring" (scripts/test.sh --all) draws new examples in each run and
# prints how to repeat one.
exploring = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("exploring", exploring)
settings.register_profile("one seed", exploring, derandomize=True, max_examples=40)
settings.load_profile("one seed")

pytest_plugins = ["tests.scheduling"]
