"""Published failure rates, and nothing else: each with its source.

Rates are interruptions per device-day. What a source does not state is not
filled in here; assumptions live in ``goodput.Assumptions``, marked as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["FT_HSDP", "RATES", "FailureRate", "FtHsdp", "Stall"]


@dataclass(frozen=True)
class FailureRate:
    """Interruptions per device-day and where the figure comes from."""

    per_device_day: float
    source: str

    def interval_s(self, devices: int) -> float:
        """Mean time between interruptions of a job on ``devices``, seconds."""
        return 86_400 / (self.per_device_day * devices)


RATES: Mapping[str, FailureRate] = MappingProxyType(
    {
        "llama3": FailureRate(
            419 / (54 * 16_384),
            "Llama 3 (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 GPUs",
        ),
        "rsc1": FailureRate(
            6.5 / 1000 / 8,
            "Meta RSC-1 (arXiv 2410.21680): 6.5 failures per 1,000 node-days, 8 GPUs a node",
        ),
        "ft-hsdp": FailureRate(
            (86_400 / (18 * 60)) / (12 * 8_192),
            "FT-HSDP (arXiv 2602.00277): one failure per 18 minutes at O(100K) GPUs, 12 replicas of 8,192",
        ),
    }
)


@dataclass(frozen=True)
class FtHsdp:
    """FT-HSDP's published parameters (arXiv 2602.00277): layout, stalls a failure, effective training time.

    Stalls and shares are the abstract's. The interval, ``replicas``, ``replica_gpus`` and that a replica is away while
    the ten minutes of a restart pass are from published summaries of the paper.
    """

    interval_s: float = 18 * 60
    restart_s: float = 10 * 60
    """Time until the restarted part is back: all GPUs of synchronous training, one replica of FT-HSDP."""
    replica_stall_s: float = 3 * 60
    """FT-HSDP's other replicas stand still."""
    replicas: int = 12
    replica_gpus: int = 8_192
    published_synchronous: float = 0.44
    published_replica: float = 0.80


FT_HSDP = FtHsdp()


@dataclass(frozen=True)
class Stall:
    """A failure every ``interval_s`` stops all for ``stall_s`` and one of ``replicas`` for ``away_s``. Seconds."""

    interval_s: float
    stall_s: float
    away_s: float
    replicas: int

    @property
    def running(self) -> float:
        """Share of time in which at least one replica trains."""
        return 1 - self.stall_s / self.interval_s

    @property
    def effective(self) -> float:
        """The same, less the share of replicas that are away."""
        return self.running - (self.away_s - self.stall_s) / self.interval_s / self.replicas
