"""No request kills an agent: its console over a real socket, its loop running."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from megatron.elastic.control.answers import Acceptance, ReshapeStatus
from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.events import Event, Wanted
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.requests import Drain, JobRequest, Reshape, ReshapeState, Status, Stop
from megatron.elastic.control.socket_names import console_name, job_name
from megatron.elastic.control.wire import frame
from megatron.elastic.ctl import CtlError, ask, main
from megatron.elastic.launch.agent.admin import Admin, Sources
from megatron.elastic.launch.agent.console import Console
from megatron.elastic.launch.agent.loop import Loop

RUN_ID = f"test-console-{os.getpid()}"


@pytest.fixture
def appended() -> Iterator[list[Event]]:
    """The effect of the requests on the job; the agent's loop runs meanwhile."""
    events: list[Event] = []
    loop, state = Loop(), Generations({0: Node("h", (0, 1))})
    console = Console(loop, RUN_ID, 0, Admin(Sources(RUN_ID, state, JobHistory(), JobClock()), events.append).handle)
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
    text = f'{{"job": "{RUN_ID}", "command": {body}}}'.encode("utf-8", "surrogatepass")
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


def test_a_request_for_another_job_is_refused(appended: list[Event]) -> None:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(20)
        caller.connect(console_name(RUN_ID, 0))
        caller.sendall(frame(JobRequest("another", Stop())))
        answer = json.loads(caller.recv(1 << 16)[4:])
    assert answer["answer"] == "refused" and f"job '{RUN_ID}', not of 'another'" in answer["error"]
    assert not appended


def test_of_jobs_whose_long_names_begin_alike_the_one_that_is_named_is_stopped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = f"{os.getpid()}/ablation-of-learning-rate-and-batch-size/a-data-set-of-tokens/warmup-of-2000-steps/"
    jobs = {run_id: list[Event]() for run_id in (base + "seed-1", base + "seed-2", base + "seed 2\n")}
    loop, state = Loop(), Generations({0: Node("h", (0, 1))})
    consoles = [
        Console(loop, run_id, 0, Admin(Sources(run_id, state, JobHistory(), JobClock()), events.append).handle)
        for run_id, events in jobs.items()
    ]
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        assert all(console.open for console in consoles)
        for run_id in jobs:
            assert main(["stop", "--run-id", run_id]) == 0
            assert json.loads(capsys.readouterr().out)["run_id"] == run_id
            assert [events for each, events in jobs.items() if each != run_id and events] == []
            assert jobs[run_id].pop() == Wanted(Stop())
        assert main(["stop", "--run-id", job_name(base + "seed-2")]) == 0, "as ctl prints it"
        assert jobs[base + "seed-2"] and not jobs[base + "seed-1"]
        assert main(["stop", "--run-id", base + "seed-3"]) == 1
        assert "does not run on this machine" in capsys.readouterr().err
    finally:
        loop.post(loop.stop)
        thread.join()
        for console in consoles:
            console.close()
        loop.close()


def test_impossible_sizes_are_refused_in_one_line(appended: list[Event], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reshape", "--tp", "2", "--pp", "2", "--dp", "1", "--run-id", RUN_ID]) == 1
    refused = "error: TP 2, PP 2, DP 1 takes 4 ranks, and 2 are here or starting: start agents on more nodes\n"
    assert capsys.readouterr().err == refused and not appended


@pytest.mark.parametrize(
    "words",
    [
        ["reshape", "--tp", "2"],
        ["reshape", "--tp", "2", "--pp", "1", "--dp", "1", "--cp", "0"],
        ["reshape", "--tp", "2", "--pp", "1", "--dp", "1", "--ep", "0"],
        ["reshape", "--tp", "2", "--pp", "1", "--dp", "-1"],
    ],
)
def test_reshape_takes_all_three_sizes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    assert "error: reshape takes --tp, --pp, --dp and perhaps --cp and --ep, each at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(("state", "code"), [("refused", 1), ("in force", 0)])
def test_ctl_returns_when_the_sizes_are_in_force_or_refused(
    state: ReshapeState,
    code: int,
    appended: list[Event],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The job answers as its agents learn from the members."""
    stands: tuple[tuple[int, ReshapeState], ...] = ((0, "open"), (1, "under way"), (1, state))
    answers = (ReshapeStatus(number, "", how, "so") for number, how in stands)

    def asked(run_id: str, node: int, request: Any) -> Any:
        found = ask(run_id, node, request)
        return replace(found, reshape=next(answers)) if isinstance(request, Status) else found

    monkeypatch.setattr("megatron.elastic.ctl.ask", asked)
    assert main(["reshape", "--tp", "1", "--pp", "2", "--dp", "1", "--run-id", RUN_ID]) == code
    said = capsys.readouterr()
    assert (said.err, said.out) == (("error: reshape refused: so\n", "") if code else ("", f"job {RUN_ID}: so\n"))
    assert appended == [Wanted(Reshape(1, 2, 1))]


def test_an_answer_larger_than_a_sockets_buffer_arrives_whole_and_delays_no_other() -> None:
    nodes = {number: Node("h" * 200, (number,)) for number in range(5000)}
    loop, state = Loop(), Generations(nodes)
    console = Console(
        loop, RUN_ID, 1, Admin(Sources(RUN_ID, state, JobHistory(), JobClock()), list[Event]().append).handle
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        with socket.socket(socket.AF_UNIX) as slow:
            slow.connect(console_name(RUN_ID, 1))
            slow.sendall(frame(JobRequest(RUN_ID, Status())))
            assert len(ask(RUN_ID, 1, Status()).nodes) == len(nodes), "while another caller does not read"
    finally:
        loop.post(loop.stop)
        thread.join()
        console.close()
        loop.close()


def test_a_status_is_printed_as_json_with_the_names_of_its_fields(
    appended: list[Event], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--json", "--run-id", RUN_ID]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["answer"] == "status" and printed["ranks"]["1"] == {
        "standing": "starting",
        "incarnation": 0,
        "returns": True,
    }
    assert printed["nodes"] == {"0": {"host": "h", "alive": True, "losses_in_1h": 0, "out_s": 0.0, "finding": ""}}
    assert printed["generation"] == {"decided": 0, "frozen": 1, "missing": [0, 1]}
    assert ask(RUN_ID, 0, Status()).nodes[0].host == "h"


def test_a_status_is_for_people_unless_json_is_asked_for(
    appended: list[Event], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--run-id", RUN_ID]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"job         {RUN_ID}: starting") and any("0 of 2 ranks" in line for line in lines)


def test_a_watch_ends_with_the_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    loop, state = Loop(), Generations({0: Node("h", (0, 1))})
    console = Console(
        loop, RUN_ID, 0, Admin(Sources(RUN_ID, state, JobHistory(), JobClock()), list[Event]().append).handle
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    shown: list[float] = []

    def sleep(seconds: float) -> None:
        shown.append(seconds)
        if len(shown) == 2:  # the job ends
            loop.post(loop.stop)
            thread.join()
            console.close()

    monkeypatch.setattr("megatron.elastic.ctl.time.sleep", sleep)
    assert main(["status", "--json", "--watch", "0.5", "--run-id", RUN_ID]) == 0
    loop.close()
    printed = capsys.readouterr()
    assert shown == [0.5, 0.5] and [json.loads(line)["run_id"] for line in printed.out.split()] == [RUN_ID, RUN_ID]
    assert "has ended" in printed.err


@pytest.mark.parametrize("words", [["drain", "--json"], ["stop", "--watch"], ["status", "--watch", "nan"]])
def test_options_of_status_are_refused_elsewhere(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--run-id", RUN_ID]) == 1
    assert capsys.readouterr().err.startswith("error: ")
