"""Runs each check of some modules in a process of its own that has the stand-in devices, and collects how each ended.

    python -m tests.standin.forked OUT MODULE...

A check is a function ``check_*`` of a module; if it takes an argument, that is a folder of its own. The process
imports torch and the modules once and forks for each check before any device is used, so a check may set the devices
up, and may end its process.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["results"]

Outcome = tuple[int, str]
"""Exit status (negative: the signal), and what was written to standard error."""


def run_forked(check: Callable[..., None]) -> Outcome:
    """Run ``check`` in a child of this process."""
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            os.dup2(errors.fileno(), 2)
            status = 1
            try:
                check(*[Path(folder)][: len(inspect.signature(check).parameters)])
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        return status, errors.read().decode(errors="replace")


def results(modules: Sequence[str], out: Path) -> dict[str, Outcome]:
    """Run this file for ``modules``, whose checks have different names, and return check → outcome."""
    import subprocess

    from tests.standin.library import ROOT, build

    build()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", __name__, str(out), *modules], env=environment, check=True, timeout=600)
    return {name: (status, text) for name, (status, text) in json.loads(out.read_text()).items()}


def main(out: str, *modules: str) -> None:
    """See the module docstring."""
    from tests.standin.device import register

    found = [item for module in modules for item in vars(importlib.import_module(module)).items()]
    register()
    outcomes = {name: run_forked(check) for name, check in found if name.startswith("check_")}
    Path(out).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
