"""The job's clock: alike on all agents, never back, whatever is done to the wall clock."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.events import Event, Lifted, NodeLost
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.quarantine import Quarantine
from megatron.elastic.control.wire import Codec, ProtocolError
from megatron.elastic.launch.agent.quarantines import Quarantines

SECONDS = st.floats(0.0, 1e6)


class Machine:
    """The boot-time clock of one machine."""

    def __init__(self, up: float) -> None:
        self.seconds = up

    def __call__(self) -> float:
        return self.seconds


@given(st.lists(SECONDS, min_size=2, max_size=5), st.lists(st.tuples(SECONDS, st.integers(0, 4), st.integers(0, 4))))
def test_clocks_that_hear_of_each_other_agree_and_never_go_back(
    ups: list[float], happens: list[tuple[float, int, int]]
) -> None:
    """``happens``: seconds go by, then one agent hears of another."""
    machines = [Machine(up) for up in ups]
    clocks = [JobClock(machine) for machine in machines]
    shown = [clock.now() for clock in clocks]
    for seconds, who, whom in happens:
        for machine in machines:
            machine.seconds += seconds
        who, whom = who % len(clocks), whom % len(clocks)
        clocks[who].hear(clocks[whom].now())
        assert clocks[who].now() >= clocks[whom].now() - 1e-3
        now = [clock.now() for clock in clocks]
        assert all(later >= earlier + seconds - 1e-3 for earlier, later in zip(shown, now, strict=True))
        shown = now


def test_a_quarantine_lasts_its_time_though_the_wall_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(500.0)
    clock, appended = JobClock(machine), list[Event]()
    nodes = {n: Node(f"h{n}", (n,)) for n in range(3)}
    state = Generations(nodes, quarantine=Quarantine(1, 60.0))
    assert state.quarantine.lost(1, [0, 2], clock.now())
    let_in = list[int]()
    quarantines = Quarantines(0, state, clock, lambda: let_in.append(0), appended.append)
    for wall, waited in ((1e12, 30.0), (0.0, 30.5)):
        monkeypatch.setattr(time, "time", lambda wall=wall: wall)
        quarantines.consider({})
        assert appended == []
        machine.seconds += waited
    quarantines.consider({})
    assert appended == [Lifted(1, 1, "its time is over")] and let_in == []


@pytest.mark.parametrize("at", ["1e999", "-1e999", "Infinity", "NaN", '"1"', "null"])
def test_a_time_that_is_none_is_refused(at: str) -> None:
    events: Codec[NodeLost] = Codec(NodeLost)
    text = '{"kind": "NodeLost", "node": 1, "epoch": 0, "why": "", "at": %s}'
    assert events.decode(text % "4") == NodeLost(1, 0, "", 4.0)
    with pytest.raises(ProtocolError):
        events.decode(text % at)
