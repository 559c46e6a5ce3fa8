"""What a job cannot go on from by itself; each is the same on every rank, where nothing else is said."""

from __future__ import annotations

__all__ = ["ActionFailed", "CommunicationFault", "NotFinite", "SilentCorruption"]


class SilentCorruption(RuntimeError):
    """Copies of a state block differ although they were stepped alike: memory has changed by itself."""


class ActionFailed(RuntimeError):
    """A fenced action could not be done on some rank (disk full, no such folder); raised on every rank alike."""


class CommunicationFault(RuntimeError):
    """Communication failed though no rank was lost, and failed again after its groups had been formed anew.

    The ranks disagree about their messages. Known to the rank that found it.
    """


class NotFinite(RuntimeError):
    """A gradient is not finite and the run does not allow it; the same on every rank."""
