"""Every time-out of the control plane, derived from one setting.

``--elastic-detection-timeout`` (seconds, default 1) says how soon a *stopped*
process is to be found. Everything that could blame a healthy process on a busy
machine is a generous multiple of it: a loss found late costs seconds, a false
one costs a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Timing"]


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    look: float
    """Between two looks at the workers' process states."""
    stopped: float
    """A process seen stopped for this long is killed."""
    grace: float
    """A suspicion waits this long for the usual cause, a death, to become known."""
    beat: float
    """Between two renewals of an agent's lease."""
    lease: float
    """An agent not heard of for this long is unreachable, and its workers are lost."""
    broken: float
    """The same for an agent whose connection to the first one broke and was not made again."""
    fence: float
    """Workers whose agent could not renew for this long end themselves; well before ``lease``."""
    resumed: float
    """The next incarnation of a lost rank waits at most this long for the others to recover before it starts."""
    silent: float
    """A link between ranks breaks when the host of one has acknowledged nothing for this long; well before ``hang``."""
    apart: float
    """The report that a host was silent waits this long for those of the other ranks."""
    unseen: float
    """A wait in native code that the worker itself has not seen for this long is not believed; well before ``hang``."""
    hang: float
    """Least time without progress, anywhere, before the wait-for graph is asked."""
    hang_factor: float
    """The same as a multiple of the longest time the phase has taken so far."""
    hang_unknown: float
    """The same while a phase has never been seen to end; at least the limit that the script sets for its set-up."""
    patience: float
    """An agent that cannot reach the store tries again for this long before it gives the job up."""
    quarantine: float
    """The first quarantine of a node that loses ranks again and again; doubled each further time."""
    examine: float
    """Between two looks at the hardware of a node (``--elastic-health``)."""

    @classmethod
    def derive(cls, detection_timeout: float, setup: float = 0.0) -> Timing:
        """All of them from ``--elastic-detection-timeout``; ``setup``: ``--distributed-timeout-minutes`` in seconds."""
        unit = detection_timeout
        return cls(
            look=min(unit / 5, 0.25),
            stopped=unit / 2,
            grace=unit / 2,
            beat=unit / 2,
            lease=10 * unit,
            broken=2 * unit,
            fence=6 * unit,
            resumed=unit,
            silent=20 * unit,
            apart=5 * unit,
            unseen=10 * unit,
            hang=30 * unit,
            hang_factor=10.0,
            hang_unknown=max(600 * unit, setup),
            patience=60 * unit,
            quarantine=60 * unit,
            examine=5 * unit,
        )
