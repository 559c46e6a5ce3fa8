"""States of the generation machine, and the entries that lead from one to the next."""

from __future__ import annotations

from megatron.elastic.comm.address import Address
from megatron.elastic.control.events import (
    Decided,
    Entry,
    Lost,
    Reported,
    Waiting,
)
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.quarantine import Quarantine

__all__ = ["entry", "loss", "machine", "report_all", "started"]


def entry(rank: int, incarnation: int = 0, report: str = "") -> Entry:
    return Entry(Address(rank, incarnation, "h"), report or f"held by {rank}")


def loss(rank: int, incarnation: int = 0) -> Lost:
    return Lost((Loss(rank, incarnation, "h", "signal SIGKILL"),), (0,), 10.0 * (rank + 5 * incarnation))


def machine(*sizes: int, respawn: bool = True) -> Generations:
    nodes, first = {}, 0
    for number, size in enumerate(sizes):
        nodes[number] = Node(f"h{number}", tuple(range(first, first + size)))
        first += size
    return Generations(nodes, respawn=respawn, quarantine=Quarantine(1))


def started(*sizes: int, respawn: bool = True) -> Generations:
    state = machine(*sizes, respawn=respawn)
    for rank in state.ranks:
        state.apply(Waiting((entry(rank),)))
    state.apply(Decided(1, 0))
    assert state.quiet and state.decided == 1
    return state


def report_all(state: Generations) -> None:
    for rank in state.missing():
        state.apply(Reported(state.frozen, (entry(rank, state.ranks[rank].incarnation),)))
