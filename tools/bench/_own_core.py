"""Megatron's training script as a rank that stays on a core of its own.

A rank that waits for a message sleeps, and where the kernel wakes it is the kernel's to decide: on a virtual machine
often on the core of the rank that sent the message, which then stands still for some milliseconds although another
core is idle. Benches that measure computing, with no more ranks than cores, keep each rank where it is.
"""

from __future__ import annotations

import os
import runpy

from tools.bench._jobs import PRETRAIN

if __name__ == "__main__":
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    runpy.run_path(PRETRAIN, run_name="__main__")
