"""A job under way as its users see it: the lines it prints, its pages, and the processor time of its launcher.

:class:`Client` is a user's browser and a metrics server in one: it asks for the page, then for the page's data and for
the metrics once a second. It runs in the process of the bench, so its own cost is not the job's.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from tools.bench._jobs import ROOT, environment

__all__ = ["Client", "WatchedJob", "asked", "cpu_seconds", "status_of"]

_PAGE = ("/", "/dashboard.js", "/dashboard.css")
_DATA = ("/state.json", "/metrics")
_OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}
_STEP = re.compile(r"iteration +(\d+)/")
_ADDRESS = re.compile(r"\[launch\] (?:live page|metrics) at (http://\S+)")


class WatchedJob:
    """``job``, started with the block. What is left of it when the block ends is killed; ``seconds``: its limit."""

    def __init__(self, job: Sequence[str], seconds: float = 200.0, **more: str) -> None:
        self._limit = threading.Timer(seconds, self._kill)
        self._job, self._more = job, more
        self.lines: list[str] = []
        self.address = ""
        """Of the page or the metrics, once the launcher has told it."""

    def __enter__(self) -> WatchedJob:
        self.launcher = subprocess.Popen(
            self._job,
            cwd=ROOT,
            env=environment(PYTHONUNBUFFERED="1", **self._more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._limit.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._limit.cancel()
        self._kill()
        self.launcher.wait()

    def _kill(self) -> None:
        if self.launcher.poll() is None:
            self.launcher.kill()

    def steps(self) -> Iterator[int]:
        """Yield each step when the job has logged it. Raises ``RuntimeError`` with the output if the job fails."""
        assert self.launcher.stdout is not None
        for line in self.launcher.stdout:
            self.lines.append(line)
            if found := _ADDRESS.search(line):
                self.address = found.group(1)
            if found := _STEP.search(line):
                yield int(found.group(1))
        if code := self.launcher.wait():
            raise RuntimeError(f"exit code {code}\n" + "".join(self.lines[-60:]))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time so far of another process and all its threads. Raises ``OSError``."""
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))  # man 3 clock_getcpuclockid
    if error:
        raise OSError(error, os.strerror(error))
    return time.clock_gettime(clock.value)


def asked(address: str, path: str) -> tuple[float, bytes]:
    """Return the seconds until the whole answer of ``path`` was there, and the answer. Raises ``OSError``."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    try:
        connection.request("GET", path, headers=_OPENMETRICS)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise OSError(f"{path}: status {answer.status}: {body[:200]!r}")
    return time.monotonic() - began, body


class Client:
    """Follows the page at ``address`` while the block runs."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self.answers = 0
        """Answers to requests for data."""
        self.answered_bytes = 0

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        for path in _PAGE:
            asked(self._address, path)
        while not self._over.wait(1.0):
            for path in _DATA:
                try:
                    _, body = asked(self._address, path)
                except OSError:  # the job has ended
                    return
                self.answers += 1
                self.answered_bytes += len(body)


def status_of(address: str) -> dict[str, Any]:
    """Return the status that the page shows."""
    return dict(json.loads(asked(address, "/state.json")[1])["status"])


def until_shown(address: str, seconds: float = 120.0) -> None:
    """Wait until the agent shows a state, half a detection time-out after its start: before, metrics have none.

    Raises ``OSError`` if it takes longer than ``seconds``.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            asked(address, "/metrics")
            return
        except OSError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.2)
