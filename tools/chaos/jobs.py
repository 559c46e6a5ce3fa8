"""A random job: its kind, layout, settings and faults, a function of the seed and its number."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.integration.kill_walk import LAYOUTS
from tests.integration.test_saving import can_mount
from tests.integration.test_standin import on_standin
from tests.scenario.scenario import Layout
from tests.standin.vendor import VERSIONS, with_hccl, with_nccl

__all__ = ["DEVICES", "KINDS", "MUON", "SETTINGS", "STATE", "Job", "drawn", "layout_of"]

EXACT = ("--elastic-exact", "--calculate-per-token-loss")
STATE = ("--elastic-snapshot", "state")
MUON = ("--optimizer", "muon")
LOCAL = ("--transformer-impl", "local")
DEVICES: Mapping[str, Callable[[Path], dict[str, str]]] = {
    "host": lambda folder: on_standin(),
    **{f"nccl-{version}": partial(with_nccl, version=version) for version in VERSIONS},
    "hccl": with_hccl,
}
"""Library for bulk data on the stand-in accelerator → environment of a job. ``host``: none, data goes by the host."""
KINDS = {"outside": 4, "script": 3, "nodes": 3, "hosts": 1, "links": 1}
"""Kind of job → its share."""


@dataclass(frozen=True)
class Setting:
    """Flags that a job may have. ``fits``: whether a layout takes them; ``exact``: whether exact mode does."""

    words: tuple[str, ...]
    fits: Callable[[Layout], bool] = lambda layout: True
    exact: bool = True


SETTINGS: tuple[tuple[Setting, ...], ...] = (
    (
        Setting(("--elastic-migrate-after", "0")),
        Setting(("--elastic-migration", "blocking", "--elastic-migrate-after", "0")),
        Setting(("--elastic-ownership", "contiguous")),
    ),
    (Setting(("--elastic-comm", "gloo")), Setting(("--elastic-transport", "tcp"))),
    (Setting(("--num-workers", "1")),),
    (Setting(("--elastic-overlap", "both", "--elastic-bucket-elements", "1")),),
    (
        Setting(("--elastic-expert-balance", "homes"), lambda layout: layout.experts > 1),
        Setting(("--elastic-expert-balance", "replicas"), lambda layout: layout.experts > 1),
        Setting(("--elastic-schedule", "zero-bubble"), lambda layout: layout.pipeline > 1 == layout.chunks),
        Setting(("--elastic-tensor", "park"), lambda layout: layout.tensor > 1),
    ),
    (
        Setting(("--bf16",)),
        Setting(MUON, exact=False),
        Setting(("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")),
        Setting(("--sequence-parallel",), lambda layout: layout.tensor > 1),
    ),
    (Setting(("--no-elastic-background-save",)), Setting(STATE)),
)
"""Of each line a job has nothing in half of all cases, else one of those that fit."""


@dataclass(frozen=True)
class Job:
    """One job, as it was drawn. ``dice``: seed of what is drawn while it runs."""

    kind: str
    layout: str
    faults: int
    dice: int
    exact: bool = False
    flags: tuple[str, ...] = ()
    full_disk: bool = False
    unsteady: bool = False
    """Between losses the wall clock jumps, and the disk is slow at times."""
    drains: bool = False
    etcd: bool = False
    device: str = ""
    """On the stand-in accelerator: the vendor's library (:data:`DEVICES`)."""
    through: tuple[Layout, ...] = ()
    """Sizes that a user asks for in turn while ranks are lost. Some may be refused."""

    def __str__(self) -> str:
        left_out = ("kind", "flags", "through")
        words = [f"{name}={value}" for name, value in vars(self).items() if value and name not in left_out]
        through = [f"through={'|'.join(map(str, self.through))}"] if self.through else []
        return " ".join([self.kind, *words, *through, *self.flags])


def drawn(seed: str, number: int) -> Job:
    """Return the job of this number."""
    dice = random.Random(f"{seed}.{number}")
    kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
    layout = dice.choice(list(LAYOUTS))
    sizes = layout_of(kind, layout)
    ranks, can_be_exact = sizes.ranks, sizes.chunks == sizes.experts == sizes.context == 1
    flags: list[str] = []
    if kind == "outside" and dice.random() < 0.5:
        late = f"delay:rank={dice.randrange(ranks)},count=0,seconds={dice.uniform(0.01, 0.1):.3f}"
        slow = f"slow:rank={dice.randrange(ranks)},step=3-4000,factor={dice.choice((2, 4))}"
        flags += ["--elastic-allow-inject", "--elastic-inject", dice.choice((late, slow))]
    etcd = kind == "nodes" and dice.random() < 0.5
    device = dice.choice(list(DEVICES)) if kind == "outside" and dice.random() < 0.3 else ""
    exact = kind == "outside" and can_be_exact and not device and dice.random() < 0.3
    if kind in ("outside", "nodes"):
        for line in SETTINGS:
            able = [setting.words for setting in line if setting.fits(sizes) and (setting.exact or not exact)]
            if etcd or device:  # gloo takes its store from an agent, and its messages from host memory
                able = [words for words in able if "gloo" not in words]
            flags += dice.choice(able) if able and dice.random() < 0.5 else ()
    flags += (*(LOCAL if device else ()), *(EXACT if exact else ()))
    through = _sizes(sizes, dice) if kind == "outside" and dice.random() < 0.3 else ()
    return Job(
        kind=kind,
        layout=layout,
        faults=dice.randint(4, 12) if kind == "outside" else dice.randint(1, 3),
        dice=dice.randrange(10**6),
        exact=exact,
        flags=tuple(flags),
        full_disk=kind == "outside" and can_mount() and dice.random() < 0.2,
        unsteady=kind == "outside" and dice.random() < 0.3,
        drains=dice.random() < 0.3 and not through,  # no rank of a single replica may leave
        etcd=etcd,
        device=device,
        through=through,
    )


def _sizes(layout: Layout, dice: random.Random) -> tuple[Layout, ...]:
    """Return some sizes of as many ranks as ``layout`` has, and at the end its own."""
    powers = [2**power for power in range(4)]
    every = [
        Layout(tensor, pipeline, data, experts=experts, context=context)
        for tensor, pipeline, data, context in itertools.product(powers, powers, powers, (1, 2))
        for experts in ((1,) if layout.experts == 1 else (1, 2, 4))
        if tensor * pipeline * data * context == layout.ranks and experts <= data
    ]
    return (*dice.sample(every, 3), layout)


def layout_of(kind: str, name: str) -> Layout:
    """Return the layout of a job; of several nodes, that of two."""
    return Layout(1, 1, 4) if kind == "nodes" else LAYOUTS[name]
