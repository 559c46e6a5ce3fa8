"""Checks of a node's hardware before its ranks are started and while they run (``--elastic-health``).

A :class:`Check` answers one question: what is wrong with this machine now? A thread asks every few seconds; the answer
reaches the agent when it changes. A node with a finding is left out like one in quarantine: its lost ranks are not
started again until the finding is gone, or until the others cannot go on without them. Its living ranks leave if the
others can take their work over.

Invariants
- A finding counts when two looks one after the other have it, and is gone when :data:`_CLEAN_LOOKS` have none.
- A check that hangs or fails is a finding of its own: the thread goes on.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from megatron.elastic._frequency import Unavailable
from megatron.elastic.config import ConfigError, HealthSetting
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.platform.gpu_health import GpuHealth

__all__ = ["Check", "ClockCheck", "DiskCheck", "HealthThread", "NetworkCheck", "checks_of", "examine"]

_CLEAN_LOOKS = 6
_DISK_SECONDS = 20.0
"""A write of 4 KiB that takes longer is a disk that hangs."""
_SYS = Path("/sys")


class Check(Protocol):
    """One property of this machine."""

    def look(self) -> str:
        """Return what is wrong in one line; empty: nothing."""


class NetworkCheck:
    """The network interfaces ``names``; without names, all with hardware behind them that are up at the first look.

    Ports of InfiniBand and RoCE devices count among those without names.
    """

    def __init__(self, names: Sequence[str] = (), sys: Path = _SYS) -> None:
        self._sys = sys
        self._names = tuple(names) or tuple(name for name in self._hardware() if self._state(name) == "up")
        self._ports = () if names else tuple(path for path in self._all_ports() if _port_state(path) == "ACTIVE")

    def look(self) -> str:
        found = [f"{name} is {self._state(name)}" for name in self._names if self._state(name) not in ("up", "unknown")]
        found += [
            f"{path.parents[2].name} port {path.parent.name} is {_port_state(path)}"
            for path in self._ports
            if _port_state(path) != "ACTIVE"
        ]
        return f"network: {', '.join(found)}" if found else ""

    def _hardware(self) -> list[str]:
        root = self._sys / "class" / "net"
        return sorted(each.name for each in root.iterdir() if (each / "device").exists()) if root.is_dir() else []

    def _state(self, name: str) -> str:
        """Return the kernel's word for the interface; the loopback and tunnels say "unknown" while they work."""
        return _read(self._sys / "class" / "net" / name / "operstate") or "absent"

    def _all_ports(self) -> list[Path]:
        return sorted((self._sys / "class" / "infiniband").glob("*/ports/*/state"))


class DiskCheck:
    """The file system of ``folder``: it can be written, within a time, and has ``free`` bytes left."""

    def __init__(self, folder: Path, free: int) -> None:
        self._folder, self._free = folder, free
        self._stuck: threading.Thread | None = None

    def look(self) -> str:
        if self._stuck is not None and self._stuck.is_alive():
            return f"disk: a write to {self._folder} has not ended"
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        thread = threading.Thread(target=lambda: answers.put(self._try()), name="health-disk", daemon=True)
        thread.start()
        try:
            return answers.get(timeout=_DISK_SECONDS)
        except queue.Empty:
            self._stuck = thread
            return f"disk: a write to {self._folder} takes longer than {_DISK_SECONDS:g} s"

    def _try(self) -> str:
        probe = self._folder / f".elastic-health-{os.getpid()}"
        try:
            there = os.statvfs(self._folder)
            free = there.f_bavail * there.f_frsize
            if free < self._free:
                return f"disk: {free / (1 << 30):.1f} GiB free in {self._folder}, {self._free / (1 << 30):g} are needed"
            with probe.open("wb") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return f"disk: {self._folder}: {error.strerror or error}"
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
        return ""


class _Timex(ctypes.Structure):
    """The first fields of the kernel's ``struct timex`` (adjtimex(2)), and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


class ClockCheck:
    """The system clock: the kernel says that it is synchronized (adjtimex(2))."""

    _TIME_ERROR, _UNSYNCHRONIZED = 5, 0x40

    def look(self) -> str:
        timex = _Timex()
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
        if state < 0:
            return f"clock: adjtimex: {os.strerror(ctypes.get_errno())}"
        if state == self._TIME_ERROR or timex.status & self._UNSYNCHRONIZED:
            return "clock: it is not synchronized (chrony or another NTP service)"
        return ""


def checks_of(settings: Sequence[HealthSetting]) -> tuple[Check, ...]:
    """Return the checks that ``--elastic-health`` names. Raises :class:`ConfigError` for what is not here to check."""
    return tuple(_check(setting) for setting in settings)


def _check(setting: HealthSetting) -> Check:
    if setting.kind == "network":
        return NetworkCheck(setting.names)
    if setting.kind == "disk":
        return DiskCheck(Path(setting.path), setting.free)
    if setting.kind == "clock":
        return ClockCheck()
    try:
        return GpuHealth(setting.path)
    except Unavailable as error:
        raise ConfigError(f"--elastic-health gpu: {error}") from None


def examine(checks: Sequence[Check]) -> str:
    """Return the findings of all checks in one line; empty: none."""
    return "; ".join(found for found in map(_look, checks) if found)


def _look(check: Check) -> str:
    try:
        return check.look()
    except Exception as error:  # whatever a driver raises is a finding, and the other checks go on
        return f"{type(check).__name__}: {error}"


class HealthThread:
    """Examines the machine again and again, and has ``loop`` call ``heard`` with its finding when it becomes unfit.

    When it is fit again, ``heard`` is called with an empty text.
    """

    def __init__(self, checks: Sequence[Check], loop: Loop, heard: Callable[[str], None], every: float) -> None:
        self._checks, self._loop, self._heard, self._every = checks, loop, heard, every
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Examine no longer. A look that is under way is left behind."""
        self._done.set()

    def _serve(self) -> None:
        told, before, clean = "", "", 0
        while not self._done.wait(self._every):
            found = examine(self._checks)
            clean = 0 if found else clean + 1
            settled = bool(found and before) or clean == _CLEAN_LOOKS
            if settled and bool(found) != bool(told):
                told = found
                self._loop.post(partial(self._heard, found))
            before = found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _port_state(path: Path) -> str:
    """Return the state of a port: the kernel writes "4: ACTIVE"."""
    return _read(path).partition(": ")[2] or "absent"
