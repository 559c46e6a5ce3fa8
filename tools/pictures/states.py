"""States of the protocol: of a rank within a step, and of a rank in the job.

The first come from every state that the bounded model of a step reaches (``tests/unit/protocol``), the second from a
walk through :class:`~megatron.elastic.control.generations.Generations`, the state machine of the agents. Boxes and
lines are placed by hand: a change without a line, or a line without its change, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from megatron.elastic.comm.address import Address
from megatron.elastic.control.events import (
    Decided,
    Entry,
    Event,
    Finished,
    Lost,
    NodeLost,
    Readmitted,
    Reported,
    Requested,
    Waiting,
    Wanted,
)
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.requests import Drain, Request
from tests.unit.protocol.protocol_model import Model
from tests.unit.protocol.protocol_state import Setting, State, initial_state
from tools.pictures.svg import BLUE, GREEN, GREY, INK, RED, Box, Drawing, Point

__all__ = ["draw_rank", "draw_step", "rank_changes", "step_changes"]

Change = tuple[str, str, str]
"""State, next state, and the action or entry of the journal between them."""
S = TypeVar("S")


class Line(NamedTuple):
    """A line of a picture, and all changes for which it stands. ``begin``: where the words begin, or their middle."""

    changes: tuple[Change, ...]
    points: tuple[tuple[float, float], ...]
    words: str = ""
    at: tuple[float, float] = (0.0, 0.0)
    color: str = GREY
    anchor: str = "middle"
    head: bool = True


# -- a rank in a step ------------------------------------------------------------------------------

STEP_BOXES: Mapping[str, tuple[Box, tuple[str, ...]]] = {
    "R": (Box(95, 134, 150, 66), ("computing", "forward, backward,", "reduce")),
    "S": (Box(305, 134, 150, 66), ("shipping", "reduced blocks travel", "to the mirrors")),
    "V": (Box(515, 134, 150, 66), ("voting", "in the all-reduce", "that commits")),
    "U": (Box(725, 134, 150, 66), ("committed", "update of blocks,", "gather of parameters")),
    "frozen": (Box(410, 292, 240, 50), ("frozen", "has reported what it holds")),
    "dead": (Box(95, 292, 150, 50), ("lost", "gone with its memory")),
}
"""Phase of the model → its box, and the words in it."""
STEP_LINES = (
    Line((("R", "S", "reduces"),), ((170, 134), (228, 134)), "reduced", (199, 122)),
    Line((("S", "V", "joins"),), ((380, 134), (438, 134)), "all is here", (409, 122)),
    Line((("V", "U", "learns the vote"),), ((590, 134), (648, 134)), "summed", (619, 122)),
    Line(
        (("V", "R", "learns the refusal"),),
        ((515, 101), (515, 68), (120, 68), (120, 99)),
        "vote refused (a gradient is not finite): compute again",
        (317, 58),
    ),
    Line((("U", "R", "gathers and computes"),), ((725, 101), (725, 30), (70, 30), (70, 99)), "next step", (397, 20)),
    *(
        Line(((phase, "dead", "killed"), (phase, "frozen", "freezes")), ((x, 167), (x, 214)), color=RED, head=False)
        for phase, x in (("R", 70), ("S", 280), ("V", 490), ("U", 700))
    ),
    Line((), ((70, 214), (700, 214)), color=RED, head=False),
    Line((), ((70, 214), (70, 265)), "killed", (78, 242), RED, "start"),
    Line((), ((490, 214), (490, 265)), "another rank was lost", (498, 242), RED, "start"),
    Line((("frozen", "dead", "killed"),), ((290, 292), (172, 292)), "killed", (231, 281), RED),
    Line((("frozen", "S", "revote"),), ((330, 267), (330, 169)), "vote again", (338, 242), GREEN, "start"),
    Line(
        (("frozen", "U", "roll_forward"), ("frozen", "U", "rerun")),
        ((530, 292), (745, 292), (745, 169)),
        "roll forward, or compute again",
        (640, 304),
        GREEN,
    ),
)


def draw_step() -> str:
    """States of a rank within a step. Red: by a loss. Green: by the decision on it."""
    drawing = Drawing(820, 332, "States of a rank within a step")
    _draw(drawing, STEP_BOXES, STEP_LINES, step_changes())
    return drawing.finished()


def step_changes() -> set[Change]:
    """Changes of a rank in all that the model reaches: two losses, and a vote that is refused."""
    found = set[Change]()
    for setting in (Setting(steps=2, refuse=True), Setting(steps=1, kills=2)):
        for state, action, following in explored(
            initial_state(setting), Model(setting).successors, lambda state: state
        ):
            for rank in range(setting.ranks):
                begin, end = _phase(state, rank), _phase(following, rank)
                if begin != end:
                    found.add((begin, end, _action(action, state)))
    return found


def _phase(state: State, rank: int) -> str:
    at = state.ranks[rank]
    if not at.alive:
        return "dead"
    # E, after the last step of the model, stands for the next step's R.
    return "frozen" if at.frozen > at.generation else at.phase.replace("E", "R")


def _action(action: str, state: State) -> str:
    """The model's word for an action, without the rank; of an adoption, the decision that is adopted."""
    if action.startswith("kill"):
        return "killed"
    words = action.split(" ", 1)[1]
    return state.decision.kind if words == "adopts" else words


# -- a rank in the job -----------------------------------------------------------------------------

RANK_BOXES: Mapping[str, tuple[Box, tuple[str, ...]]] = {
    "lost": (Box(95, 180, 150, 50), ("lost", "is started again, or not")),
    "starting": (Box(345, 90, 180, 50), ("starting", "a job without members")),
    "waiting": (Box(345, 270, 180, 50), ("waiting", "for the members to admit it")),
    "member": (Box(590, 180, 120, 50), ("member", "trains")),
    "done": (Box(755, 180, 90, 50), ("done", "has left")),
}
"""Standing of a rank's present incarnation → its box, and the words in it."""
_LEFT = tuple((standing, "done", "Decided") for standing in ("lost", "starting", "waiting"))
_ENDS = ("Lost", "NodeLost")
RANK_LINES = (
    Line((("lost", "starting", "Waiting"),), ((110, 155), (110, 82), (253, 82)), "Waiting", (180, 71)),
    Line(
        tuple(("starting", "lost", name) for name in _ENDS),
        ((255, 100), (150, 100), (150, 153)),
        "Lost, NodeLost",
        (203, 112),
        RED,
    ),
    Line((("lost", "waiting", "Waiting"),), ((110, 205), (110, 280), (253, 280)), "Waiting", (180, 291)),
    Line(
        tuple(("waiting", "lost", name) for name in _ENDS),
        ((255, 262), (150, 262), (150, 207)),
        "Lost, NodeLost",
        (203, 250),
        RED,
    ),
    Line((("starting", "member", "Decided"),), ((435, 90), (570, 90), (570, 153)), "Decided", (500, 79)),
    Line(
        (("waiting", "member", "Decided"),),
        ((435, 270), (570, 270), (570, 207)),
        "all asked 'join': Decided",
        (500, 281),
    ),
    Line(
        tuple(("member", "lost", name) for name in _ENDS), ((530, 180), (172, 180)), "Lost, NodeLost", (255, 169), RED
    ),
    Line(
        tuple(("waiting", "starting", name) for name in _ENDS),
        ((380, 245), (380, 117)),
        "no member is left",
        (388, 220),
        RED,
        "start",
    ),
    Line(
        (("member", "done", "Finished"), ("member", "done", "Decided")),
        ((650, 180), (708, 180)),
        "Finished",
        (680, 169),
    ),
    Line(_LEFT, ((80, 155), (80, 40), (755, 40), (755, 153)), "asked to leave before it was lost: Decided", (400, 30)),
    Line((("done", "lost", "Readmitted"),), ((755, 205), (755, 320), (80, 320), (80, 207)), "Readmitted", (400, 331)),
)


def draw_rank() -> str:
    """Standing of a rank in the job, with the entries of the journal that change it. Red: losses."""
    drawing = Drawing(820, 345, "Standing of a rank in the job")
    _draw(drawing, RANK_BOXES, RANK_LINES, rank_changes())
    return drawing.finished()


def rank_changes() -> set[Change]:
    """Changes of a rank's standing in a job of two nodes with a rank each."""
    start = msgspec.json.encode(Generations({node: Node("host", (node,)) for node in range(2)}))
    found = set[Change]()
    for before, name, after in explored(start, _appended, _kind):
        one, other = (msgspec.json.decode(text, type=Generations) for text in (before, after))
        for rank, state in one.ranks.items():
            if state.standing != other.ranks[rank].standing:
                found.add((state.standing, other.ranks[rank].standing, name))
    return found


def _appended(text: bytes) -> Iterator[tuple[str, bytes]]:
    """Entries that agents can append in this state (text, since the machine is mutable), and the state after each."""
    for event in _events(msgspec.json.decode(text, type=Generations)):
        state = msgspec.json.decode(text, type=Generations)
        state.apply(event)
        yield type(event).__name__, msgspec.json.encode(state)


def _kind(text: bytes) -> Hashable:
    """States that differ in numbers of generations and incarnations only, or in past losses, are of one kind."""
    state = msgspec.json.decode(text, type=Generations)
    ranks = [(rank.standing, rank.entry is None, rank.may_return, rank.announced) for rank in state.ranks.values()]
    return (
        tuple(ranks),
        tuple(node.alive for node in state.nodes.values()),
        (state.quiet, state.fresh, state.reason, state.drain, state.joiners, state.pending().join),
        tuple(sorted(state.reports)),
    )


def _events(state: Generations) -> Iterator[Event]:
    """Entries of living incarnations and of the successors of lost ones, of a user, and of the coordinator."""
    for rank, at in state.ranks.items():
        entry = Entry(Address(rank, at.incarnation, "host"), "")
        if at.standing == "lost" and state.returns(rank):
            yield Waiting((Entry(Address(rank, at.incarnation + 1, "host"), ""),))
        if at.standing == "done":
            yield Readmitted((rank,))
        if at.standing in ("lost", "done"):
            continue
        if at.standing == "starting" and at.entry is None:
            yield Waiting((entry,))
        yield Lost((Loss(rank, at.incarnation, "host", "signal SIGKILL"),), (0,))
        yield NodeLost(rank, state.nodes[rank].epoch, "unreachable")
        if at.standing == "member":
            yield Reported(state.frozen, (entry,))
            yield Finished(rank, at.incarnation, 0)
    yield Requested(Request.JOIN, state.members, state.decided)
    yield Requested(Request.LEAVE, state.members, state.decided)
    yield Wanted(Drain((1,)))
    yield Decided(state.frozen, 0)


# -- both ------------------------------------------------------------------------------------------


def explored(
    start: S, successors: Callable[[S], Iterator[tuple[str, S]]], kind: Callable[[S], Hashable]
) -> Iterator[tuple[S, str, S]]:
    """Every (state, action, next state) that can be reached from ``start``, from one state of each kind."""
    known, stack = {kind(start)}, [start]
    while stack:
        state = stack.pop()
        for action, following in successors(state):
            yield state, action, following
            if kind(following) not in known:
                known.add(kind(following))
                stack.append(following)


def _draw(
    drawing: Drawing, boxes: Mapping[str, tuple[Box, tuple[str, ...]]], lines: Sequence[Line], found: set[Change]
) -> None:
    """Boxes and lines. Raises ``ValueError`` where the lines are not those of ``found``."""
    shown = {change for line in lines for change in line.changes}
    if shown != found:
        raise ValueError(f"without a line: {sorted(found - shown)}; drawn, but not found: {sorted(shown - found)}")
    for line in lines:
        points = [Point(*place) for place in line.points]
        (drawing.arrow if line.head else drawing.line)(points, line.color)
    for box, (name, *words) in boxes.values():
        drawing.box(box)
        top = box.y - 8 * len(words)
        drawing.text(Point(box.x, top), name, 14, BLUE, bold=True)
        for number, text in enumerate(words):
            drawing.text(Point(box.x, top + 18 + 15 * number), text, 11)
    for line in lines:
        if line.words:
            color = INK if line.color == GREY else line.color
            drawing.text(Point(*line.at), line.words, 11, color, line.anchor, ground=True)
