"""What a job cannot go on from by itself; each is the same on every rank."""

from __future__ import annotations

__all__ = ["ActionFailed", "NotFinite", "SilentCorruption"]


class SilentCorruption(RuntimeError):
    """Copies of a state block differ although they were stepped alike: memory has changed by itself."""


class ActionFailed(RuntimeError):
    """A fenced action could not be done on some rank (disk full, no such folder); raised on every rank alike."""


class NotFinite(RuntimeError):
    """A gradient is not finite and the run does not allow it; the same on every rank."""
