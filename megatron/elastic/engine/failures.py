"""Errors that end a job, or an action. Every rank raises the same one unless its docstring says otherwise."""

from __future__ import annotations

__all__ = ["ActionFailed", "CommunicationFault", "NotFinite", "SilentCorruption"]


class SilentCorruption(RuntimeError):
    """Copies of a state block differ although their updates were equal: memory has changed by itself."""


class ActionFailed(RuntimeError):
    """A fenced action failed on some rank (disk full, no such folder); raised on every rank."""


class CommunicationFault(RuntimeError):
    """Communication failed without the loss of a rank, and failed again after groups were formed anew.

    Ranks then disagree about a message. Raised only on the rank that found it.
    """


class NotFinite(RuntimeError):
    """A gradient is not finite and the run does not allow it."""
