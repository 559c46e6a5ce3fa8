"""A scenario: sizes of a job, its settings, and in order the faults and the requests of users that it meets.

The text form is one line of words, which can be pasted into a test or a command line::

    pp2dp2 steps=4 seed=3 back=never mirrors=2 kill:rank=0,step=2,point=after_ship drain:rank=3,step=1

    pp2dp2, tp2dp2, dp3v2       tensor, pipeline and data-parallel size, model chunks a stage
    tp2cp2dp1                   the context-parallel size
    ep2dp4, ep4pp2dp4           the expert-parallel size of a model with experts (in a job)
    steps=4                     steps of the job
    seed=3                      order of events in a cluster; which interleavings of a large model are tried
    back=never                  when lost ranks return (:data:`RETURNS`), or after how many seconds of a cluster
    evaluate=2                  steps between evaluations, 0 for none
    heavy=on                    units cost so much that moving them pays off (in a cluster; a job measures its own)
    micro_batches=4             micro-batches a replica and step (in a cluster; a job has those of its flags)
    mirrors=2                   any other field of ``ElasticConfig``
    kill:rank=0,...             a fault of ``--elastic-inject``, in its grammar
    checkpoint:step=2           a user asks for a checkpoint once step 2 is over
    drain:step=3                a user asks for the end of the job once step 3 is over; with ``rank=``: that these leave
    admit:rank=2,step=3         a user lets rank 2 in once step 3 is over: a lost one returns, whatever ``back`` says,
                                and a spare adds a replica
    reshape:to=1|4|1,step=2     a user asks for these tensor-, pipeline- and data-parallel sizes once step 2 is over;
                                further numbers are the context- and the expert-parallel size
    spares=1                    as many ranks beyond the launch, which have the numbers that follow

Words of a default value are left out. ``parse`` is the inverse of ``str``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_type_hints

from megatron.elastic.config import ElasticConfig, plain_type
from megatron.elastic.engine.inject import Fault
from megatron.elastic.engine.inject import default as default_fault
from megatron.elastic.engine.inject import parse as parse_faults

__all__ = ["EXPERTS", "RETURNS", "SETTINGS", "Layout", "Scenario", "Wish", "parse"]

RETURNS: Mapping[str, str] = {
    "soon": "point=before_step,seconds=0.1",
    "same_step": "point=mid_backward,seconds=0.6",
    "vote": "point=before_vote,seconds=3",
    "boundary": "point=between_steps,seconds=3",
    "migration": "point=in_migration_begin,seconds=3",
}
"""When a lost rank is back → where members linger as long as it is missing.

``soon``: some steps later; a little idling leaves the processor to the rank that starts. ``migration``: copies that its
loss left missing are under way among the survivors. That a second rank is lost before the first is back is expressed by
a kill at a point of recovery.
"""
NEVER = "never"
SETTINGS: Mapping[str, type] = {
    name: plain_type(hint)
    for name, hint in get_type_hints(ElasticConfig).items()
    if name not in ("respawn", "inject", "allow_inject", "print_patches", "check")
}
"""Fields of ``ElasticConfig`` that a scenario may set, with their types."""
LAYOUT = re.compile(r"(?:tp(\d+))?(?:cp(\d+))?(?:ep(\d+))?(?:pp(\d+))?dp(\d+)(?:v(\d+))?")
EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear")
"""Flags of a model with experts."""
EVERY = ("--moe-router-topk", "4")
"""Each token goes to every expert. With fewer, rounding decides between two experts once in some 100,000 choices, and a
long job with losses then differs from an undisturbed one by more than rounding (docs/log.md)."""


@dataclass(frozen=True)
class Layout:
    """Sizes of a job. Ranks are numbered tensor, context, data, pipeline; ``chunks``: model chunks a stage.

    ``experts``: adjacent replicas that share experts; above 1 the model has experts.
    """

    tensor: int
    pipeline: int
    data: int
    chunks: int = 1
    experts: int = 1
    context: int = 1

    def __str__(self) -> str:
        before = (("tp", self.tensor), ("cp", self.context), ("ep", self.experts), ("pp", self.pipeline))
        chunks = f"v{self.chunks}" if self.chunks > 1 else ""
        return "".join(f"{name}{size}" for name, size in before if size > 1) + f"dp{self.data}{chunks}"

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags that ask for it, beside those of the sizes."""
        chunks = () if self.chunks == 1 else ("--num-virtual-stages-per-pipeline-rank", str(self.chunks))
        parts = () if self.context == 1 else ("--context-parallel-size", str(self.context))
        shared = ("--expert-model-parallel-size", str(self.experts))
        cut = ("--sequence-parallel",) if self.tensor > 1 else ()
        return (*chunks, *parts) if self.experts == 1 else (*chunks, *parts, *EXPERTS, *EVERY, *shared, *cut)

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    def elsewhere(self, rank: int) -> int:
        """A rank that may be lost beside ``rank``: with two mirrors no stage and no block is without a rank."""
        if self.tensor > 1 or self.context > 1:
            return rank ^ 1  # its partner in the tensor-parallel group, or with another part of the sequence
        if self.experts > 2:
            return rank ^ 1  # of the same crew, whose experts then have two homes fewer
        if 1 < self.experts < self.data:
            return rank ^ self.experts  # the same experts in another crew
        return (rank + self.data) % self.ranks  # the same replica, the next stage

    @property
    def batch(self) -> int:
        """Samples of a step, which replicas take in micro-batches of two."""
        return 16 if 16 % (2 * self.data) == 0 else 4 * self.data

    @property
    def batch_flags(self) -> tuple[str, ...]:
        """Flags that ask for :attr:`batch`, where it is not that of all jobs."""
        return () if self.batch == 16 else ("--global-batch-size", str(self.batch))

    @property
    def plain(self) -> Layout:
        """Of its undisturbed run: one replica, or one crew. The other sizes decide the initial weights."""
        data = 2 if self.tensor == self.context == self.pipeline == self.experts == 1 else self.experts
        return replace(self, data=data)


@dataclass(frozen=True)
class Wish:
    """A user's request of ``ctl`` once ``step`` is over. A drain of no ``ranks`` is one of the whole job."""

    step: int
    what: Literal["drain", "checkpoint", "admit", "reshape"] = "drain"
    ranks: tuple[int, ...] = ()
    """Of a reshape: the sizes."""

    def __str__(self) -> str:
        name = "to" if self.what == "reshape" else "rank"
        ranks = f"{name}={'|'.join(map(str, self.ranks))}," if self.ranks else ""
        return f"{self.what}:{ranks}step={self.step}"


@dataclass(frozen=True)
class Scenario:
    """See the module docstring."""

    layout: Layout = Layout(1, 2, 2)
    steps: int = 5
    seed: int = 0
    back: str = "soon"
    evaluate: int = 2
    heavy: bool = False
    micro_batches: int = 2
    settings: tuple[tuple[str, Any], ...] = ()
    """(field of ``ElasticConfig``, value), by name."""
    faults: tuple[Fault, ...] = ()
    wishes: tuple[Wish, ...] = ()

    def __post_init__(self) -> None:
        if self.back not in (NEVER, *RETURNS) and not re.fullmatch(r"\d+\.\d+", self.back):
            raise ValueError(f"back={self.back}: {NEVER}, {', '.join(RETURNS)}, or seconds such as 0.05")
        unknown = [name for name, _ in self.settings if name not in SETTINGS]
        if unknown or list(self.settings) != sorted(self.settings):
            raise ValueError(f"settings are fields of ElasticConfig, by name: {self.settings}")

    def __str__(self) -> str:
        words = [str(self.layout)]
        for field in fields(self)[1:7]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={_text(value)}")
        words += [f"{name}={_text(value)}" for name, value in self.settings]
        words += [_fault_text(fault) for fault in self.faults]
        return " ".join([*words, *map(str, self.wishes)])

    @property
    def mirrors(self) -> int:
        """Copies of a block besides the owner's."""
        return int(dict(self.settings).get("mirrors", ElasticConfig.mirrors))

    @property
    def spares(self) -> int:
        """Number of ranks beyond the launch."""
        return int(dict(self.settings).get("spares", ElasticConfig.spares))

    @property
    def ranks(self) -> int:
        """Number of ranks that are started, spares included."""
        return self.layout.ranks + self.spares

    @property
    def returns(self) -> bool:
        """True if lost ranks come back by themselves."""
        return self.back != NEVER

    @property
    def ends_early(self) -> bool:
        """True if a user asks for the end of the job."""
        return any(wish.what == "drain" and not wish.ranks for wish in self.wishes)

    @property
    def script(self) -> list[str]:
        """The faults in the grammar of ``--elastic-inject``, one a word."""
        return [_fault_text(fault) for fault in self.faults]

    @property
    def lingering(self) -> str:
        """The word by which members linger while a rank is missing, at the place where it is to be back."""
        return f"delay:missing=1,count=0,{RETURNS[self.back]}" if self.back in RETURNS else ""

    def kills(self) -> list[Fault]:
        """The faults that end a process."""
        return [fault for fault in self.faults if fault.kind in ("kill", "exit", "stop", "raise", "oom")]

    def after(self, losses: int) -> Scenario:
        """The same faults that many losses into a job. At its begin a step passes first: before it, all start anew."""
        if not losses:
            first = replace(self.faults[0], wait=max(1, self.faults[0].wait))
            return replace(self, faults=(first, *self.faults[1:]))

        def later(number: int | None) -> int | None:
            return None if number is None else number + losses

        moved = (replace(one, losses=later(one.losses), rejoin=later(one.rejoin)) for one in self.faults)
        return replace(self, faults=tuple(moved))


def parse(text: str) -> Scenario:
    """The scenario that ``text`` writes down. Raises ``ValueError`` that names the word."""
    found: dict[str, Any] = {"settings": {}, "faults": [], "wishes": []}
    own = {"steps": int, "seed": int, "back": str, "evaluate": int, "heavy": bool, "micro_batches": int}
    for word in text.split():
        name, equals, value = word.partition("=")
        if ":" in name:
            _take_event(word, found)
        elif equals and name in own:
            found[name] = _value(word, own[name], value)
        elif equals and name in SETTINGS:
            found["settings"][name] = _value(word, SETTINGS[name], value)
        elif (sizes := LAYOUT.fullmatch(word)) is not None:
            tensor, context, experts, pipeline, data, chunks = (int(size or 1) for size in sizes.groups())
            found["layout"] = Layout(tensor, pipeline, data, chunks, experts, context)
        else:
            raise ValueError(f"{word!r} is no layout, setting or fault")
    settings, faults, wishes = (found.pop(name) for name in ("settings", "faults", "wishes"))
    return Scenario(**found, settings=tuple(sorted(settings.items())), faults=tuple(faults), wishes=tuple(wishes))


def _take_event(word: str, found: dict[str, Any]) -> None:
    sizes = re.fullmatch(r"reshape:to=(\d+(?:\|\d+){2,4}),step=(\d+)", word)
    if sizes is not None:
        found["wishes"].append(Wish(int(sizes[2]), "reshape", tuple(map(int, sizes[1].split("|")))))
        return
    asked = re.fullmatch(r"(drain|checkpoint|admit):(?:rank=(\d+(?:\|\d+)*),)?step=(\d+)", word)
    fits = asked is not None and (asked[1] == "drain" or bool(asked[2]) == (asked[1] == "admit"))
    if asked is not None and fits:
        ranks = tuple(map(int, asked[2].split("|"))) if asked[2] else ()
        found["wishes"].append(Wish(int(asked[3]), asked[1], ranks))  # type: ignore[arg-type]
    elif word.startswith(("drain", "checkpoint", "admit", "reshape")):
        kinds = "drain:[rank=R|R,]step=S, checkpoint:step=S, admit:rank=R|R,step=S, reshape:to=T|P|D[|C[|E]],step=S"
        raise ValueError(f"{word!r} is none of {kinds}")
    else:
        found["faults"] += parse_faults(word)


def _value(word: str, kind: type, text: str) -> Any:
    if kind is bool:
        if text not in ("on", "off"):
            raise ValueError(f"{word!r}: on or off")
        return text == "on"
    return kind(text) if kind in (int, float) else text


def _text(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _fault_text(fault: Fault) -> str:
    """The word of ``--elastic-inject`` that reads as ``fault``."""
    plain = default_fault(fault.kind)
    points = "points" if fault.kind == "random" else "point"
    conditional = fault.losses is not None or fault.rejoin is not None or fault.missing or fault.wait
    lives = frozenset[int]() if conditional else plain.incarnations
    words: list[tuple[str, Any, Any]] = [
        ("rank", fault.ranks, plain.ranks),
        ("losses", fault.losses, None),
        ("rejoin", fault.rejoin, None),
        ("missing", int(fault.missing), 0),
        ("wait", fault.wait, 0),
        ("step", fault.steps, plain.steps),
        (points, fault.points, plain.points),
        ("incarnation", fault.incarnations, lives),
        *((name, getattr(fault, name), getattr(plain, name)) for name in ("nth", "count", "code", "seconds")),
        ("factor", fault.factor, None if fault.kind == "slow" else 1.0),
        ("seed", fault.seed, None if fault.kind == "random" else 0),
        ("rate", fault.rate, None if fault.kind == "random" else 0.0),
        *((name, getattr(fault, name), getattr(plain, name)) for name in ("kinds", "copy", "tensor")),
    ]
    said = [f"{name}={_alternatives(value)}" for name, value, default in words if value != default]
    return ":".join([fault.kind, ",".join(said)]) if said else f"{fault.kind}:"


def _alternatives(value: Any) -> str:
    if isinstance(value, frozenset):
        return "|".join(map(str, sorted(value))) or "*"
    return "|".join(value) if isinstance(value, tuple) else str(value)
