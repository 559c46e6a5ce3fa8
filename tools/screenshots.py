"""Pictures of the live page while a worker is killed, taken by a browser without a window from a real job.

    python -m tools.screenshots [--out docs/images]

Four ranks, PP 2 x DP 2. Rank 3 is killed by SIGKILL and, with ``--no-elastic-respawn``, is not started again by
itself, so that there is time for a picture without it. ``ctl admit`` starts it again.

    page-before.png    all ranks compute
    page-lost.png      rank 3 is lost: the others compute its share, and the loss is marked in both charts
    page-back.png      rank 3 is a member again
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.browser import screenshot
from tools.bench._jobs import QUIET, ROOT, command, environment

__all__ = ["main"]

RUN_ID, LOST = "screenshots", 3
MODEL = QUIET + shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 1 --global-batch-size 16 --vocab-size 255 --pipeline-model-parallel-size 2
    --train-iters 100000 --elastic --no-elastic-respawn --elastic-dashboard 0
""")
_SECONDS = 120.0
_STEPS = 25
"""Steps between two pictures, so that the charts show something."""


class Job:
    """The job under way. Killed when the block ends before it is drained."""

    def __enter__(self) -> Job:
        launch = command(4, *MODEL)
        at = launch.index("--nproc-per-node")
        self._launcher = subprocess.Popen(
            [*launch[:at], "--rdzv-id", RUN_ID, *launch[at:]],
            cwd=ROOT,
            env=environment(PYTHONUNBUFFERED="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        found = self._wait(lambda: re.search(r"live page at (http://\S+)", "".join(self._lines)))
        self.url: str = found.group(1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._launcher.poll() is None:
            self._launcher.kill()
        self._launcher.wait()

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        self._lines.extend(self._launcher.stdout)

    def status(self) -> dict[str, Any]:
        """The status that the page shows."""
        with urllib.request.urlopen(f"{self.url}state.json", timeout=30) as answer:
            return dict(json.loads(answer.read())["status"])

    def steps(self) -> None:
        """Wait for some further steps."""
        self._wait(lambda: self._step() > 0)
        target = self._step() + _STEPS
        self._wait(lambda: self._step() >= target)

    def ctl(self, *words: str) -> None:
        """One request to the job."""
        subprocess.run(
            [sys.executable, "-m", "megatron.elastic.ctl", *words, "--run-id", RUN_ID],
            cwd=ROOT,
            env=environment(),
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def members(self, count: int) -> None:
        """Wait until the job has ``count`` members."""
        self._wait(lambda: len(self.status()["members"]) == count)

    def _step(self) -> int:
        return int((self.status()["progress"] or {"step": 0})["step"])

    def _wait(self, ready: Callable[[], Any]) -> Any:
        end = time.monotonic() + _SECONDS
        while self._launcher.poll() is None and time.monotonic() < end:
            try:
                if found := ready():
                    return found
            except OSError:  # the page is starting
                pass
            time.sleep(0.2)
        raise RuntimeError("the job did not get there\n" + "".join(self._lines[-40:]))


def main() -> None:
    """Run the job, take the three pictures, drain it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with Job() as job:
        job.steps()
        screenshot(job.url, options.out / "page-before.png")
        os.kill(job.status()["workers_here"][str(LOST)]["pid"], signal.SIGKILL)
        job.members(3)
        job.steps()
        screenshot(job.url, options.out / "page-lost.png")
        job.ctl("admit", "--ranks", str(LOST))
        job.members(4)
        job.steps()
        screenshot(job.url, options.out / "page-back.png")


if __name__ == "__main__":
    main()
