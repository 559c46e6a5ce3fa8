"""Fault injection by a script that names rank, time and kind of each fault.

Grammar of ``--elastic-inject``::

    fault[;fault...]        fault = kind[:field=value,...]

    kill:rank=2,step=5,point=after_reduce       SIGKILL
    stop:rank=0|1,step=5                        SIGSTOP, in two ranks
    exit:rank=3,step=4,code=7                   exits at once with a status
    raise:rank=1,step=2,point=mid_forward,nth=3 an exception, at the third time this step gets there
    oom:rank=1,step=2                           an allocation too large for any machine
    delay:rank=1,step=3|4,seconds=0.5           sleeps: a straggler
    slow:rank=1,step=5-20,factor=2              every computation of these steps takes twice as long
    flip:rank=2,step=6,point=after_gather,copy=mirror,tensor=exp_avg
                                                one bit of a state block this rank owns or mirrors
    nonfinite:rank=0,step=2                     a number of this rank's gradient becomes infinite
    random:seed=7,rate=0.001                    each rank, each step, with this probability

    kill:rank=1,losses=3,point=mid_update       the first step after three ranks were lost and all are back
    kill:rank=2,rejoin=4,point=in_recovery_edit while the last missing rank is being admitted

``|`` separates alternatives, ``step=5-20`` is 5 to 20. ``count`` is the number of times in one process (0: no limit).
Defaults: every ``rank``, every ``step``, ``point=before_step``, ``nth=1``, ``count=1``, ``copy=owner``,
``tensor=master``. The ``point`` of ``nonfinite`` is before_reduce, the default, or mid_backward. The default
``incarnation`` is the first life of a rank; ``*`` is every life, the default with ``losses`` and ``rejoin``. ``copy``
may be mirror, ``tensor`` may be exp_avg or exp_avg_sq. ``random`` also takes ``kinds=kill|stop`` and ``points=...``.

Many losses in one job are ordered by the number of losses before them: while every rank is
present, the sum of their incarnations is that number, and every process can compute it.
``losses=k`` holds from the time when all ranks are present after k losses and every copy of
state is in place, until the recovery from the next loss. ``rejoin=k`` holds from the entry of
the generation in which all are present again until copies are in place. ``missing=1`` holds
while some rank is missing; such a ``delay`` ends as soon as a lost rank asks to be admitted.
``wait=n`` first lets n steps pass with all ranks present and in place.

Invariant: faults are a function of the seed, per (rank, incarnation, step), so a run can be
repeated and processes need no communication. Without faults, a point costs one test.

The syntax follows torchft's ``EventInjector``.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from megatron.elastic.config import ConfigError

__all__ = [
    "FIRST_INCARNATION",
    "GRADIENT_POINTS",
    "KILL_POINTS",
    "RELAY_POINTS",
    "STEP_POINTS",
    "Effects",
    "Fault",
    "InjectedFault",
    "Injector",
    "default",
    "parse",
]

FIRST_INCARNATION = 0
"""Number of a rank's first incarnation."""
_LOOK_SECONDS = 0.02
"""Between two looks whether a missing rank has asked to be admitted."""

KILL_POINTS: Mapping[str, str] = MappingProxyType(
    {
        "in_setup": "before the first step: about to form the engine (nth 1), state resumed (2), building data (3)",
        "before_step": "the step's samples are not yet known",
        "after_prepare": "samples and plan of the step are fixed, no piece is computed",
        "mid_forward": "between two forwards of the schedule table (nth: which)",
        "mid_backward": "between two backwards of the schedule table (nth: which)",
        "before_reduce": "all gradients are accumulated, none reduced",
        "mid_reduce": "some unit groups are reduced, others not",
        "after_reduce": "owners hold reduced blocks, mirrors not yet",
        "after_ship": "mirrors hold the reduced blocks too",
        "before_vote": "about to join the vote",
        "after_vote": "the step is committed, no block is updated",
        "mid_update": "some owned blocks are updated, others not",
        "after_update": "all blocks are updated, parameters not gathered",
        "mid_gather": "some units have their new parameters",
        "after_gather": "all parameters are of the new version",
        "after_step": "the step is over, its record kept",
        "between_steps": "in the host's loop: the step before is over, the next not begun",
        "mid_overlap_reduce": "a unit group's reduce has begun beside the backward (--overlap-grad-reduce; nth: which)",
        "mid_overlap_gather": "the forward waits for parameters of a unit (--overlap-param-gather; nth: which)",
        "in_evaluate": "inside an evaluation pass",
        "in_save": "a checkpoint is about to be planned",
        "save_writing": "in the background, about to write a file of a checkpoint",
        "save_finish": "the files of a checkpoint are written, it has not its name yet",
        "save_whole": "a checkpoint is complete, about to be renamed (on the rank that renames it)",
        "save_named": "a checkpoint has its name, the tracker file names an older one (on the same rank)",
        "save_tracked": "the tracker file names a new checkpoint, other ranks do not know it yet (on the same rank)",
        "in_recovery_freeze": "the rank has stopped acting on older generations",
        "in_recovery_decide": "the rank knows the decision, has not acted on it",
        "in_recovery_edit": "groups are being edited",
        "in_recovery_promote": "mirrors are being promoted, blocks moved",
        "in_recovery_resume": "recovered, about to finish or re-run the step",
        "in_migration_begin": "copies have begun to move in the background",
        "in_migration_finish": "in the step whose vote is to name the moved copies, about to count them",
        "in_migration_switch": "a vote has named the moved copies, none is updated, the old ones are dropped",
        "in_join": "a newcomer is receiving state",
        "in_relay_to_owner": "messages of reduced blocks to owners that do not compute their units are under way",
        "in_relay_to_delegate": "messages of parameters from such owners are under way",
    }
)
"""Name of each point → the state of the rank there. The engine calls them; tests cover all of them."""

RELAY_POINTS = ("in_relay_to_owner", "in_relay_to_delegate")
"""The points that a rank passes only in a step with owners that do not compute their units, if it takes part."""

STEP_POINTS: tuple[str, ...] = tuple(list(KILL_POINTS)[1 : list(KILL_POINTS).index("between_steps")])
"""The points that every undisturbed step passes, in order."""

_KINDS = ("kill", "stop", "exit", "raise", "oom", "delay", "slow", "flip", "nonfinite", "random")
_COPIES = ("owner", "mirror")
_TENSORS = ("master", "exp_avg", "exp_avg_sq")
GRADIENT_POINTS = ("before_reduce", "mid_backward")
"""The points at which a rank has gradients that are not reduced; ``nonfinite`` is for these alone."""
_AT_POINTS = tuple(kind for kind in _KINDS if kind not in ("random", "slow"))
_FIELDS = {
    "rank": _KINDS,
    "step": tuple(kind for kind in _KINDS if kind != "random"),
    "point": _AT_POINTS,
    "nth": _AT_POINTS,
    "count": tuple(kind for kind in _KINDS if kind != "slow"),
    "factor": ("slow",),
    "incarnation": _KINDS,
    "losses": _KINDS,
    "rejoin": _KINDS,
    "missing": _KINDS,
    "wait": _KINDS,
    "code": ("exit",),
    "seconds": ("delay",),
    "copy": ("flip",),
    "tensor": ("flip",),
    "seed": ("random",),
    "rate": ("random",),
    "kinds": ("random",),
    "points": ("random",),
}


class InjectedFault(RuntimeError):
    """The exception of the fault ``raise``."""


@dataclass(frozen=True)
class Fault:
    """One line of the script. Empty ``ranks``, ``steps`` or ``incarnations`` mean any."""

    kind: str
    ranks: frozenset[int] = frozenset()
    steps: frozenset[int] = frozenset()
    points: tuple[str, ...] = ("before_step",)
    incarnations: frozenset[int] = frozenset({FIRST_INCARNATION})
    losses: int | None = None
    """Only while all ranks are present after this many losses, with all copies in place."""
    rejoin: int | None = None
    """Only while all ranks are present again after this many losses, with copies not in place yet."""
    missing: bool = False
    """Only while some rank is missing."""
    wait: int = 0
    """Only after this many steps with all ranks present."""
    nth: int = 1
    count: int = 1
    code: int = 1
    seconds: float = 1.0
    factor: float = 1.0
    seed: int = 0
    rate: float = 0.0
    kinds: tuple[str, ...] = ("kill",)
    copy: str = "owner"
    tensor: str = "master"


def _refuse(why: str) -> ConfigError:
    return ConfigError(f"--elastic-inject: {why}")


def _whole(field: str, text: str, least: int = 0) -> int:
    try:
        value = int(text)
    except ValueError:
        raise _refuse(f"{field}={text!r} is not a whole number") from None
    if value < least:
        raise _refuse(f"{field}={text} must be {least} or more")
    return value


def _span(field: str, text: str) -> range:
    """Return the numbers of ``7`` or ``5-20``."""
    first, dash, last = text.partition("-")
    start = _whole(field, first)
    return range(start, (_whole(field, last, least=start) if dash else start) + 1)


def _real(field: str, text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _refuse(f"{field}={text!r} is not a number") from None
    if not 0.0 <= value <= most:
        raise _refuse(f"{field}={text} must be between 0 and {most:g}")
    return value


def _names(field: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(text.split("|"))
    for name in names:
        if name not in known:
            raise _refuse(f"unknown {field} {name!r}; one of {', '.join(known)}")
    return names


def _with_field(fault: Fault, field: str, text: str) -> Fault:  # noqa: C901, PLR0912 - a case for each field
    """Return ``fault`` with one ``field=text`` applied."""
    points = tuple(KILL_POINTS)
    match field:
        case "rank":
            return replace(fault, ranks=frozenset(_whole(field, part) for part in text.split("|")))
        case "step":
            return replace(fault, steps=frozenset(step for part in text.split("|") for step in _span(field, part)))
        case "factor":
            factor = _real(field, text, most=1000.0)
            if factor < 1.0:
                raise _refuse(f"factor={text} must be 1 or more")
            return replace(fault, factor=factor)
        case "incarnation":
            lives = frozenset() if text == "*" else frozenset(_whole(field, part) for part in text.split("|"))
            return replace(fault, incarnations=lives)
        case "point":
            return replace(fault, points=_names(field, text, GRADIENT_POINTS if fault.kind == "nonfinite" else points))
        case "points":
            return replace(fault, points=_names("point", text, points))
        case "kinds":
            return replace(fault, kinds=_names("kind", text, tuple(kind for kind in _KINDS if kind != "random")))
        case "losses":
            return replace(fault, losses=_whole(field, text))
        case "rejoin":
            return replace(fault, rejoin=_whole(field, text))
        case "missing":
            return replace(fault, missing=bool(_whole(field, text)))
        case "wait":
            return replace(fault, wait=_whole(field, text))
        case "nth":
            return replace(fault, nth=_whole(field, text, least=1))
        case "count":
            return replace(fault, count=_whole(field, text))
        case "code":
            code = _whole(field, text)
            if code > 255:
                raise _refuse(f"code={code} must be 255 or less")
            return replace(fault, code=code)
        case "copy":
            return replace(fault, copy=_names("copy", text, _COPIES)[0])
        case "tensor":
            return replace(fault, tensor=_names("tensor", text, _TENSORS)[0])
        case "seed":
            return replace(fault, seed=_whole(field, text))
        case "rate":
            return replace(fault, rate=_real(field, text, most=1.0))
        case _:
            return replace(fault, seconds=_real(field, text, most=86400.0))


def default(kind: str) -> Fault:
    """Return the fault of ``kind`` that a script without fields names."""
    match kind:
        case "random":
            return Fault(kind, points=STEP_POINTS)
        case "nonfinite":
            return Fault(kind, points=GRADIENT_POINTS[:1])
        case _:
            return Fault(kind)


def _parse_one(text: str) -> Fault:
    kind, _, rest = text.partition(":")
    kind = kind.strip()
    if kind not in _KINDS:
        raise _refuse(f"unknown fault {kind!r}; one of {', '.join(_KINDS)}")
    fault = default(kind)
    seen: set[str] = set()
    for part in filter(None, (part.strip() for part in rest.split(","))):
        field, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise _refuse(f"{part!r} is not field=value")
        if kind not in _FIELDS.get(field, ()):
            allowed = ", ".join(name for name, kinds in _FIELDS.items() if kind in kinds)
            raise _refuse(f"{kind} has no field {field!r}; it takes {allowed}")
        if field in seen:
            raise _refuse(f"{field} is given twice in {text!r}")
        seen.add(field)
        fault = _with_field(fault, field, value)
    if seen & {"losses", "rejoin", "missing", "wait"} and "incarnation" not in seen:
        fault = replace(fault, incarnations=frozenset())
    if kind == "random" and not {"seed", "rate"} <= seen:
        raise _refuse("random needs seed= and rate=")
    if kind == "slow" and "factor" not in seen:
        raise _refuse("slow needs factor=")
    return fault


def parse(text: str | None, ranks: int | None = None) -> tuple[Fault, ...]:
    """Return the faults of an ``--elastic-inject`` script; none for ``None`` or an empty one.

    Raises ``ConfigError``, one line that names the flag, also for a rank that a job of ``ranks`` ranks never has.
    """
    faults = tuple(_parse_one(part.strip()) for part in (text or "").split(";") if part.strip())
    absent = [rank for fault in faults for rank in fault.ranks if ranks is not None and rank >= ranks]
    if ranks is not None and absent:
        raise _refuse(f"rank={min(absent)} is not in this job: name ranks from 0 to {ranks - 1}")
    return faults


class Effects:
    """The effects of faults on this process."""

    def kill(self) -> None:
        """End the process by SIGKILL."""
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        """Stop the process by SIGSTOP."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def exit(self, code: int) -> None:
        """End the process as a crashing library would, without running handlers."""
        os._exit(code)

    def sleep(self, seconds: float) -> None:
        """Block the thread."""
        time.sleep(seconds)


def _nothing_to_flip(copy: str, tensor: str) -> None:
    raise InjectedFault("flip: this process holds no state yet")


def _nothing_to_spoil() -> None:
    raise InjectedFault("nonfinite: this process holds no gradients yet")


class Injector:
    """Carries out a fault script in one process. ``device``: device on which ``oom`` allocates."""

    def __init__(
        self,
        faults: tuple[Fault, ...],
        rank: int,
        incarnation: int = FIRST_INCARNATION,
        seed: int = 0,
        device: str = "cpu",
        effects: Effects = Effects(),  # noqa: B008 - immutable
    ) -> None:
        mine = [f for f in faults if rank in (f.ranks or {rank}) and incarnation in (f.incarnations or {incarnation})]
        self._faults = tuple(mine)
        self._rank = rank
        self._incarnation = incarnation
        self._seed = seed
        self._device = device
        self._effects = effects
        self._fired: Counter[Fault] = Counter()
        self._reached: Counter[tuple[int, str]] = Counter()
        self._drawn: dict[tuple[Fault, int], Fault | None] = {}
        self.flip: Callable[[str, str], None] = _nothing_to_flip
        """Flips one bit of a block: (copy, tensor). Set by the owner of the pool."""
        self.spoil: Callable[[], None] = _nothing_to_spoil
        """Makes a number of this rank's gradient infinite. Set by the owner of the gradients."""
        self.is_asked: Callable[[], bool] = lambda: False
        """True while a rank that is not a member asks to be admitted. Set by the owner of the membership."""
        self._entering: int | None = None
        """Losses so far, if every rank is present in the generation decided last."""
        self._settled: int | None = None
        """The same for the generation in which work goes on."""
        self._present: int | None = None
        """The same once copies are in place."""
        self._whole_steps = 0

    def enter(self, incarnations: Collection[int], slots: int) -> None:
        """Note that a generation of members with these ``incarnations`` is decided."""
        self._entering = sum(incarnations) if len(incarnations) == slots else None

    def settle(self) -> None:
        """Note that work goes on in the generation entered last."""
        self._settled, self._present = self._entering, None
        self._whole_steps = 0

    def restore(self) -> None:
        """Note that all copies of state are in place; called at every such step."""
        self._present = self._settled

    def _holds(self, fault: Fault) -> bool:
        """Return whether the present ranks and the losses so far meet the conditions of ``fault``."""
        if fault.missing and self._settled is not None:
            return False
        if fault.wait and (self._present is None or self._whole_steps <= fault.wait):
            return False
        if fault.losses is not None and fault.losses != self._present:
            return False
        return fault.rejoin is None or (fault.rejoin == self._entering and self._present is None)

    def reach(self, point: str, step: int) -> None:
        """Carry out the faults of the script for ``point`` of ``step``, at which this process is now.

        Raises ``InjectedFault`` (``raise``), torch's out-of-memory error (``oom``), ``ValueError`` for a
        point that is not in ``KILL_POINTS``.
        """
        if not self._faults:
            return
        if point not in KILL_POINTS:
            raise ValueError(f"{point!r} is not a named point")
        self._reached[step, point] += 1
        self._whole_steps += point == "before_step" and self._present is not None
        for scripted in self._faults:
            if scripted.kind == "slow":
                continue
            fault = self._draw(scripted, step) if scripted.kind == "random" else scripted
            if fault is None or (fault.steps and step not in fault.steps) or point not in fault.points:
                continue
            if not self._holds(fault):
                continue
            if self._reached[step, point] < fault.nth or 0 < scripted.count <= self._fired[scripted]:
                continue
            self._fired[scripted] += 1
            self._fire(fault, point, step)

    def drag(self, step: int, spent: Callable[[], int]) -> None:
        """Sleep until a computation of ``step``, of ``spent()`` nanoseconds, has taken ``factor`` times as long."""
        for fault in self._faults:
            if fault.kind == "slow" and (not fault.steps or step in fault.steps):
                self._effects.sleep(spent() * (fault.factor - 1.0) / 1e9)

    def _draw(self, fault: Fault, step: int) -> Fault | None:
        """Return the fault drawn from a ``random`` fault for this process at ``step``; equal at every call."""
        if (fault, step) not in self._drawn:
            words = (fault.seed, self._seed, self._rank, self._incarnation, step)
            dice = random.Random("/".join(map(str, words)))
            hit = dice.random() < fault.rate
            kind, point = dice.choice(fault.kinds), dice.choice(fault.points)
            self._drawn[fault, step] = replace(fault, kind=kind, points=(point,)) if hit else None
        return self._drawn[fault, step]

    def _fire(self, fault: Fault, point: str, step: int) -> None:
        if fault.kind == "delay":
            self._delay(fault)
            return
        where = f"{point} ({KILL_POINTS[point]})"
        line = f"injected {fault.kind}: rank {self._rank}, step {step}, {where}, wall time {time.time():.4f}"
        print(line, file=sys.stderr, flush=True)
        sys.stdout.flush()
        match fault.kind:
            case "kill":
                self._effects.kill()
            case "stop":
                self._effects.stop()
            case "exit":
                self._effects.exit(fault.code)
            case "flip":
                self.flip(fault.copy, fault.tensor)
            case "nonfinite":
                self.spoil()
            case "raise":
                raise InjectedFault(line)
            case _:
                torch.empty(1 << 58, dtype=torch.int8, device=self._device)  # 256 PiB: the allocator's own error

    def _delay(self, fault: Fault) -> None:
        """Sleep as ``fault`` says. Who lingers for a missing rank goes on once it asks to be admitted."""
        if not fault.missing:
            self._effects.sleep(fault.seconds)
            return
        left = fault.seconds
        while left > 0 and not self.is_asked():
            self._effects.sleep(min(left, _LOOK_SECONDS))
            left -= _LOOK_SECONDS
