"""The setting of nonuniform tensor parallelism (arXiv 2504.06095, section 6): throughput with devices missing.

Theirs: 32K devices in domains of 32, tensor-parallel size 32, eight domains a replica, a model of 480B parameters (100
layers, 128 heads, hidden size 20,480, sequences of 16K), 16M tokens a step. A share of the devices has failed at
random places. They report losses of at most 12% by dropping replicas, at most 3% with NTP, and below 1% with up to 1.3
times the power, for up to 4e-3 of the devices. NTP runs groups of 30 or 28 there.

A cell with fewer ranks has as much less memory as speed.

Here: costs are those of layers, split into attention, dealt by whole heads, and the rest, dealt by columns. So a group
of 31 is 11% slower, not 3%: one rank of it has five heads, not four. Transfers are free, steps run 1F1B. Policies
that keep the batch have whole micro-batches to share, those that shrink it leave some out; the measure is samples a
second. Speed by power is theirs up to 1.2 times (2.8% less work a watt at 1.1, 6.5% at 1.2), continued to 1.3 by
the same slope: that last point is an assumption.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from megatron.elastic.plan.cost import PPM
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.planner import nominal_plan
from megatron.elastic.plan.policies.base import PolicyOutcome
from megatron.elastic.plan.policies.elaswave import ElasWave
from megatron.elastic.plan.policies.ntp import NonuniformTP
from megatron.elastic.plan.policies.torchft import TorchFT
from megatron.elastic.plan.schedule.timing import plan_time
from megatron.elastic.plan.search.partition import Model
from megatron.elastic.plan.search.shapes import ShapeTimer
from megatron.elastic.plan.search.steady import DecisionOptions
from megatron.elastic.plan.tensor import packed, parked, raised, reduced_cells
from megatron.elastic.plan.topology import regular_topology
from megatron.elastic.simulate.scenarios import NEVER_PAYS, layer_profile

__all__ = ["NTP", "WAYS", "Setting", "damaged", "kept", "power_gain_ppm", "throughput_kept"]

_WORK_BY_POWER = ((1.0, 1.0), (1.1, 1.1 * (1 - 0.028)), (1.2, 1.2 * (1 - 0.065)))
"""(power, work a second), both relative to nominal (arXiv 2504.06095, as published summaries of the paper give it)."""
POWER_LIMIT = 1.3


@dataclass(frozen=True)
class Setting:
    """A job and the share of its devices that have failed."""

    replicas: int = 128
    stages: int = 8
    tensor: int = 32
    layers: int = 100
    heads: int = 128
    columns: int = 4 * 20_480
    attention: float = 0.375
    """Attention's share of a layer's operations: (8 h + 2 s) / (24 h + 2 s) with hidden size h and sequence s."""
    waves: int = 8
    failed: float = 4e-3
    headroom: float = 1.25
    """Memory of a cell, as a multiple of the memory that the largest stage needs."""

    @property
    def memory_bytes(self) -> int:
        """Memory of a whole cell, in the units of the profile."""
        model = Model(self.profile, 1, self.replicas)
        widest = -(-self.layers // self.stages)
        return int(model.stage_bytes(0, widest, min(self.stages, self.waves)) * self.headroom)

    @property
    def profile(self) -> Profile:
        """Equal layers."""
        return layer_profile(self.layers)

    def rate_ppm(self, size: int) -> int:
        """Speed of a group of ``size`` ranks relative to a whole one, by its rank with most heads and columns."""

        def part(whole: int) -> float:
            return -(-whole // size) / (whole / self.tensor)

        return int(PPM / (self.attention * part(self.heads) + (1 - self.attention) * part(self.columns)))


NTP = Setting()
"""The paper's setting: 32,768 devices."""
NTP_SIZES = (30, 28)
"""Sizes that the paper's groups are reduced to."""
_ANY = 1 << 30
"""Number of pieces up to which rerouting is tried: parked cells have no other answer without another cut."""


def damaged(setting: Setting, seed: int, sizes: Sequence[int] | None = None) -> Topology:
    """The topology with that share of devices lost, at places drawn by ``seed``.

    A cell goes on with the largest of ``sizes`` (default: any) that its living ranks can man; without one it is lost.
    """
    whole = regular_topology(setting.replicas, setting.stages, setting.layers, waves=setting.waves, tp=setting.tensor)
    devices = len(whole.cells) * setting.tensor
    draw = np.random.default_rng(seed)
    lost = set(draw.choice(devices, round(setting.failed * devices), replace=False).tolist())
    cells, idle = [], set[int]()
    for cell in whole.cells:
        left = tuple(rank for rank in cell.ranks if rank not in lost)
        size = len(left)
        if size < setting.tensor and sizes is not None:
            size = max((some for some in sizes if some <= size), default=0)
        idle.update(left[size:])
        if size == setting.tensor:
            cells.append(cell)
        elif size:
            rate = setting.rate_ppm(size)
            memory = setting.memory_bytes * rate // PPM
            cells.append(replace(cell, ranks=left[:size], nominal_ppm=rate, memory_bytes=memory))
    return replace(whole, cells=tuple(cells), parked=tuple(sorted(idle)))


def power_gain_ppm(power: float) -> int:
    """Speed (ppm of nominal) of a device at ``power`` times its nominal power, at most 1.3."""
    if not 1 <= power <= POWER_LIMIT:
        raise ValueError(f"power {power}: between 1 and {POWER_LIMIT} times the nominal one")
    (low, below), (high, above) = _WORK_BY_POWER[-2:] if power > _WORK_BY_POWER[1][0] else _WORK_BY_POWER[:2]
    return round((below + (power - low) / (high - low) * (above - below)) * PPM)


Way = Callable[[Setting, int], tuple[Topology, PolicyOutcome]]
"""(setting, seed) → the topology that the outcome is for, and the outcome."""


def _wave(boosted: bool = False, **axes: object) -> Way:
    options = replace(DecisionOptions(horizon_ns=NEVER_PAYS), **axes)  # type: ignore[arg-type]

    def way(setting: Setting, seed: int) -> tuple[Topology, PolicyOutcome]:
        cells = damaged(setting, seed)
        if boosted:
            cells = raised(cells, power_gain_ppm(POWER_LIMIT))
        return cells, ElasWave(options).respond(cells, setting.profile)

    return way


def _dropping(restart: bool) -> Way:
    def way(setting: Setting, seed: int) -> tuple[Topology, PolicyOutcome]:
        cells = damaged(setting, seed)
        parking = parked(cells, reduced_cells(cells))
        if restart:
            parking = packed(parking, seats_change=True)
        return parking, TorchFT().respond(parking, setting.profile)

    return way


def _ntp(power: float) -> Way:
    policy = NonuniformTP(power_gain_ppm(power))

    def way(setting: Setting, seed: int) -> tuple[Topology, PolicyOutcome]:
        cells = damaged(setting, seed, NTP_SIZES)
        return cells, policy.respond(cells, setting.profile)

    return way


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "dropping replicas": _dropping(restart=False),
        "dropping replicas, damage packed at a restart": _dropping(restart=True),
        "ntp": _ntp(1.0),
        "ntp with power": _ntp(POWER_LIMIT),
        "parking": _wave(tensor=False, graph=None, max_pieces=_ANY),
        "parking, layers cut anew": _wave(tensor=False),
        "living on": _wave(graph=None),
        "living on, layers cut anew": _wave(),
        "living on with clocks": _wave(boosted=True, graph=None),
        "living on with clocks, layers cut anew": _wave(boosted=True),
    }
)
"""Answers by name. Those of ``elaswave`` have one axis off or on each: tensor, graph (layers cut anew), clocks."""


def kept(way: str, setting: Setting, seed: int) -> float:
    """Samples a second of one draw relative to the undamaged job; 0: it stops. ``way`` is a name of :data:`WAYS`."""
    cells, outcome = WAYS[way](setting, seed)
    if outcome.answer is None:
        return 0.0
    single = regular_topology(1, setting.stages, setting.layers, waves=setting.waves)
    nominal = plan_time(nominal_plan(single, setting.profile), setting.profile)
    rows = setting.replicas * setting.waves
    if isinstance(outcome.answer, Plan):
        time = plan_time(outcome.answer, setting.profile)
    elif way.startswith("ntp"):
        time = outcome.step_ns  # of groups that are all alike in a damaged replica, which ``cells`` are not
    else:
        time = ShapeTimer(cells, setting.profile, False).timed(outcome.answer).time_ns
    return outcome.rows / rows * nominal / time


def throughput_kept(way: str, setting: Setting, seeds: Sequence[int]) -> list[float]:
    """:func:`kept` of each draw."""
    return [kept(way, setting, seed) for seed in seeds]
