"""No request kills an agent: its console over a real socket, its loop running."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from megatron.elastic.control.answers import Acceptance
from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.events import Event, Wanted
from megatron.elastic.control.generations import Generations, Node
from megatron.elastic.control.requests import Drain, Status
from megatron.elastic.ctl import CtlError, ask, main
from megatron.elastic.launch.agent.admin import Admin
from megatron.elastic.launch.agent.console import Console, console_name
from megatron.elastic.launch.agent.loop import Loop

RUN_ID = f"test-console-{os.getpid()}"


@pytest.fixture
def appended() -> Iterator[list[Event]]:
    """The effect of the requests on the job; the agent's loop runs meanwhile."""
    events: list[Event] = []
    loop, state = Loop(), Generations({0: Node("h", (0, 1))})
    console = Console(loop, RUN_ID, 0, Admin(RUN_ID, state, JobClock(), dict, dict, events.append).handle)
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield events
    loop.post(loop.stop)
    thread.join()
    console.close()
    loop.close()


@pytest.mark.parametrize(
    "body",
    [
        '{"do": "drain", "ranks": [1e999]}',
        '{"do": "drain", "ranks": [NaN]}',
        '{"do": "drain", "ranks": [-1e999]}',
        '{"do": "drain", "ranks": [' + "9" * 400 + "]}",
        '{"do": "drain", "ranks": {"1": 1}}',
        '{"do": 1}',
        "[]",
        "1e999",
        "[" * 40_000,
        '{"do": "drain", "ranks": [true]}',
        '{"do": "stop", "ranks": [1]}',
        '{"do": "end"}',
        "\ud800",
        "{}",
    ],
)
def test_a_request_that_is_none_ends_its_connection_alone(appended: list[Event], body: str) -> None:
    text = body.encode("utf-8", "surrogatepass")
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(20)
        caller.connect(console_name(RUN_ID, 0))
        caller.sendall(struct.pack(">I", len(text)) + text)
        assert caller.recv(100) == b""
    assert ask(RUN_ID, 0, Status()).run_id == RUN_ID, "the agent answers the next one"
    assert not appended


def test_a_request_is_carried_out(appended: list[Event]) -> None:
    assert ask(RUN_ID, 0, Drain((1,))) == Acceptance("drain", RUN_ID, (1,))
    with pytest.raises(CtlError, match=r"no such ranks: \[7\]"):
        ask(RUN_ID, 0, Drain((7,)))
    assert appended == [Wanted(Drain((1,)))]


def test_a_status_is_printed_as_json_with_the_names_of_its_fields(
    appended: list[Event], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--run-id", RUN_ID]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["answer"] == "status" and printed["ranks"]["1"] == {
        "standing": "starting",
        "incarnation": 0,
        "returns": True,
    }
    assert printed["nodes"] == {"0": {"host": "h", "alive": True, "losses_in_1h": 0, "out_s": 0.0}}
    assert printed["generation"] == {"decided": 0, "frozen": 1, "missing": [0, 1]}
    assert ask(RUN_ID, 0, Status()).nodes[0].host == "h"
