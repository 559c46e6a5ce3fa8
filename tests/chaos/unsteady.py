"""A machine whose wall clock jumps and whose disk is slow, for one job.

``unsteady.c`` is preloaded into the job's processes.
"""

from __future__ import annotations

import mmap
import struct
import subprocess
from pathlib import Path

__all__ = ["Unsteady"]

_SOURCE = Path(__file__).with_suffix(".c")
_TROUBLE = struct.Struct("ll")


class Unsteady:
    """Trouble of one job. ``environment``: what its processes are started with; other processes go on as they are."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        library, shared = folder / "unsteady.so", folder / "trouble"
        command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl", "-lpthread"]
        subprocess.run(command, check=True, timeout=60)
        shared.write_bytes(bytes(_TROUBLE.size))
        self.environment = {"LD_PRELOAD": str(library), "UNSTEADY": str(shared)}
        self._clock, self._disk = 0, 0
        with shared.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _TROUBLE.size)

    def clock(self, seconds: int) -> None:
        """Put the wall clock ``seconds`` ahead of the machine's, or behind it."""
        self._clock = seconds
        self._write()

    def disk(self, seconds: float) -> None:
        """Let each write and each sync of a file take so much longer."""
        self._disk = round(1e6 * seconds)
        self._write()

    def _write(self) -> None:
        self._map[:] = _TROUBLE.pack(self._clock, self._disk)
