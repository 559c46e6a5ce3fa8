"""Events that members report for users alone: ``ctl status``, the summary of a run, metrics.

They travel like every message of a worker and are entries of the journal, so every agent knows the same history, also
one that comes later. The agreement ignores them.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from megatron.elastic.comm.address import Rank
from megatron.elastic.control.wire import Int64

__all__ = [
    "CAUSES",
    "COMPUTED_AGAIN",
    "RESTART",
    "BusiestExpert",
    "DrawnCell",
    "DrawnSegment",
    "DrawnTopology",
    "ExpertLoads",
    "Observation",
    "Protection",
    "Recovered",
    "Reprotected",
    "Stepping",
]


COMPUTED_AGAIN = "computed again"
RESTART = "restart"
CAUSES = ("decide", "edit", "plan", "settle", COMPUTED_AGAIN, RESTART)
"""Causes of lost time: the phases of a recovery, and two more (:mod:`megatron.elastic.control.history`)."""


class Protection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The losses that the state survives, in numbers."""

    ranks: Int64 = 0
    """Any so many ranks at once."""
    nodes: Int64 = 0
    """Any so many nodes at once."""
    short: Int64 = 0
    """State blocks that lack copies for now."""
    blocks: Int64 = 0
    """State blocks of the job."""


class _DrawnPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the parts of a message."""


class DrawnCell(_DrawnPart, frozen=True):
    """A tensor-parallel group. ``speed_ppm``: relative to its peers; ``rows``: of the global batch that it computes."""

    cell: Int64
    ranks: tuple[Rank, ...]
    speed_ppm: Int64
    rows: Int64


class DrawnSegment(_DrawnPart, frozen=True):
    """Units ``[first, end)`` that ``cell`` computes as part of pipeline ``replica``."""

    replica: Int64
    cell: Int64
    first: Int64
    end: Int64


class DrawnTopology(_DrawnPart, frozen=True):
    """The cells, stages and mirrors from now on, for a page that draws them."""

    generation: Int64
    step: Int64
    units: Int64
    cells: tuple[DrawnCell, ...]
    segments: tuple[DrawnSegment, ...]
    mirrors: tuple[tuple[Rank, Rank, Int64], ...]
    """(owner, mirror, state blocks)."""


class BusiestExpert(_DrawnPart, frozen=True):
    """The expert of ``layer`` (counted from 1) that receives most tokens. ``ratio``: to the mean of its experts."""

    layer: Int64
    expert: Int64
    ratio: float


class ExpertLoads(_DrawnPart, frozen=True):
    """The measured load of the experts that ranks share, after ``step``: a mean over the last steps."""

    step: Int64
    experts: Int64
    """Number of experts of a layer."""
    imbalance: float
    """Tokens of the busiest rank in each layer, summed over layers, relative to those of a mean rank: 1 is even."""
    busiest: tuple[BusiestExpert, ...]
    """One a layer with experts, by layer."""


class _Observation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=True):
    """Base of the events. ``at`` is set by the agent: seconds of the job."""


class Stepping(_Observation, frozen=True):
    """``step`` was the first one committed since the job began, or since it began anew."""

    step: Int64
    at: float = 0.0


class Recovered(_Observation, frozen=True):
    """Steps go on in ``generation``. ``step``: the step under way, or between steps the newest committed one."""

    generation: Int64
    step: Int64
    outcome: str
    """As in :class:`megatron.elastic.observe.event_kinds.RecoveryEvent`."""
    seconds: Mapping[str, float]
    """By phase, in order, on the rank that reports: 'decide', 'edit', 'plan', 'settle'."""
    repeated_s: float = 0.0
    """Seconds of work in the step that are computed again."""
    lost_steps: Int64 = 0
    """Committed steps that are computed again."""
    lost: tuple[Rank, ...] = ()
    joined: tuple[Rank, ...] = ()
    at: float = 0.0


class Reprotected(_Observation, frozen=True):
    """Every state block has its mirrors again, ``seconds`` after the loss that left some short of one."""

    step: Int64
    seconds: float
    blocks: Int64
    """The most that were short of a mirror at one time."""
    at: float = 0.0


Observation = Stepping | Recovered | Reprotected
