"""Chromium without a window: a page as a user's browser makes it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

__all__ = ["Element", "needs_browser", "rendered", "screenshot"]

_CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
needs_browser = pytest.mark.skipif(not _CHROMIUM, reason="no chromium is installed")
_SECONDS = 180.0


class Element(dict[str, str]):
    """The attributes of an element, with its name and its own text."""

    def __init__(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        super().__init__({key: value or "" for key, value in attributes})
        self.name, self.text = name, ""


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, attrs))
        self._open = True

    def handle_endtag(self, tag: str) -> None:
        self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            self.elements[-1].text += data


def _run(url: str, *options: str) -> str:
    with tempfile.TemporaryDirectory() as profile:
        command = [_CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={profile}", "--virtual-time-budget=4000", "--window-size=1240,1000"]
        done = subprocess.run([*command, *options, url], capture_output=True, text=True, timeout=_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def rendered(url: str) -> list[Element]:
    """The elements of the page after its scripts have run for some seconds."""
    page = _Page()
    page.feed(_run(url, "--dump-dom"))
    return page.elements


def screenshot(url: str, path: Path) -> bytes:
    """The same as a picture (PNG), also written to ``path``."""
    _run(url, f"--screenshot={path}")
    return path.read_bytes()
