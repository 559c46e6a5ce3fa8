"""Each cloud's notices are read from a local server that speaks as its metadata service does, refusals included."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.control.events import Event, Wanted
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.requests import Drain, Request
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.agent.node_conditions import NodeConditions
from megatron.elastic.launch.agent.notices import AzureSource, GcpSource, NodeDrain, NoticeThread, source_of
from tests.unit.launch.serving import serve

Answer = tuple[int, str] | tuple[int, str, dict[str, str]]


@contextmanager
def service(answer: Callable[[str, str, dict[str, str]], Answer]) -> Iterator[str]:
    """A server of ``answer(method, path, headers)``; its address."""

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            status, body, *headers = answer(self.command, self.path, dict(self.headers))
            self.send_response(status)
            for name, value in (headers[0] if headers else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_PUT = _serve

        def log_message(self, format: str, *args: Any) -> None:
            """Not into the output of tests."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_aws_needs_a_token_and_gets_a_new_one_when_it_has_run_out() -> None:
    notice: list[str] = []
    tokens: list[str] = []

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        given = {name.lower(): value for name, value in headers.items()}
        if (method, path) == ("PUT", "/latest/api/token"):
            assert given["x-aws-ec2-metadata-token-ttl-seconds"] == "21600"
            tokens.append(f"token{len(tokens)}")
            return 200, tokens[-1]
        if given.get("x-aws-ec2-metadata-token") != tokens[-1]:
            return 401, ""
        assert (method, path) == ("GET", "/latest/meta-data/spot/instance-action")
        return (200, notice[0]) if notice else (404, "")

    with service(answer) as url:
        source = source_of(f"aws={url}")
        assert source.look() == ""
        tokens.append("another")  # the first one is over
        assert source.look() == "" and tokens[-1] == "token2"
        notice.append('{"action": "terminate", "time": "2026-09-18T08:22:00Z"}')
        assert source.look() == "spot interruption: terminate at 2026-09-18T08:22:00Z"


def test_gcp_tells_preemption_and_a_maintenance_that_ends_the_machine() -> None:
    values = {"preempted": "FALSE", "maintenance-event": "NONE"}

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        assert headers["Metadata-Flavor"] == "Google"
        return 200, values[path.removeprefix("/computeMetadata/v1/instance/")], {"Metadata-Flavor": "Google"}

    with service(answer) as url:
        source = source_of(f"gcp={url}")
        assert source.look() == ""
        values["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
        assert source.look() == "", "a live migration takes nothing away"
        values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        assert source.look() == "host maintenance: TERMINATE_ON_HOST_MAINTENANCE"
        values["preempted"] = "TRUE"
        assert source.look() == "preempted"


def test_a_server_that_is_not_googles_gives_no_notice() -> None:
    with (
        service(lambda *request: (200, "TRUE")) as url,
        pytest.raises(OSError, match="status 200 for /computeMetadata"),
    ):
        GcpSource(url).look()


def test_azure_tells_events_of_this_machine_that_end_it() -> None:
    events: list[dict[str, Any]] = []

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        assert headers["Metadata"] == "true"
        if path.startswith("/metadata/instance/compute/name?"):
            return 200, "vm_1"
        assert path.startswith("/metadata/scheduledevents?api-version=")
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": events})

    def event(kind: str, machine: str) -> dict[str, Any]:
        when = "Mon, 19 Sep 2026 18:29:47 GMT"
        return {"EventId": "1", "EventType": kind, "Resources": [machine], "NotBefore": when}

    with service(answer) as url:
        source = AzureSource(url)
        assert source.look() == ""
        events += [event("Preempt", "vm_2"), event("Freeze", "vm_1")]
        assert source.look() == "", "another machine, and a pause"
        events.append(event("Preempt", "vm_1"))
        assert source.look() == "scheduled event: Preempt, not before Mon, 19 Sep 2026 18:29:47 GMT"


@pytest.mark.parametrize(
    ("answer", "notice"),
    [((404, "no"), ""), ((204, ""), ""), ((200, " \n"), ""), ((200, "rack 7\nis serviced\n"), "rack 7 is serviced")],
)
def test_a_url_of_ones_own_answers_with_a_text(answer: Answer, notice: str) -> None:
    with service(lambda method, path, headers: answer if path == "/a?b=c" else (500, "")) as url:
        assert source_of(f"{url}/a?b=c").look() == notice


@pytest.mark.parametrize("body", ["", "[]", "no json", '{"Events": 3}'])
def test_an_answer_without_sense_is_an_error_or_none_and_no_notice(body: str) -> None:
    with service(lambda method, path, headers: (200, body)) as url:
        try:
            assert AzureSource(url).look() == ""
        except (OSError, ValueError, TypeError) as error:
            assert not isinstance(error, TypeError) or body == '{"Events": 3}'


def test_a_service_that_is_away_is_one_line_and_its_notice_is_heard_once(capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[str | OSError] = [OSError("refused"), OSError("refused"), "", "taken away", "taken away"]

    class Source:
        def look(self) -> str:
            found = answers.pop(0)
            if isinstance(found, OSError):
                raise found
            return found

    loop, heard = Loop(), list[str]()
    thread = NoticeThread(Source(), loop, heard.append, every=0.01)
    serve(loop, lambda: bool(heard))
    thread._thread.join(20)
    thread.close()
    loop.close()
    assert heard == ["taken away"] and answers == ["taken away"]
    assert capsys.readouterr().err.count("does not answer (refused)") == 1


def job() -> tuple[Generations, NodeDrain, list[Event]]:
    """Two nodes of two ranks, the four of which are members; the drain of the second node."""
    state, appended = Generations({0: Node("a", (0, 1)), 1: Node("b", (2, 3))}), list[Event]()
    for rank in range(4):
        state.ranks[rank].standing = "member"
    return state, NodeDrain("node 1 (b)", (2, 3), state, appended.append), appended


def test_a_notice_asks_the_ranks_of_the_node_to_leave() -> None:
    state, drain, appended = job()
    drain.heard("preempted")
    assert appended == [Wanted(Drain((2, 3)))]
    state.apply(appended[0])
    drain.follow()
    for rank in (2, 3):  # they have left
        state.ranks[rank].standing = "done"
    state.drain = None
    drain.follow()
    assert len(appended) == 1


def test_ranks_that_the_others_need_make_it_a_drain_of_the_job() -> None:
    state, drain, appended = job()
    drain.heard("preempted")
    state.apply(appended[0])
    drain.follow()
    state._requests[Request.STAY] = {0, 1, 2, 3}  # all members have asked for it
    state._grant(Request.STAY)
    drain.follow()
    assert appended[1:] == [Wanted(Drain())]
    state.apply(appended[1])
    drain.follow()
    assert state.drain == () and len(appended) == 2


def test_an_agent_asks_for_notices_if_a_setting_names_a_source_and_drains_its_own_node() -> None:
    state, loop, appended = job()[0], Loop(), list[Event]()
    with service(lambda method, path, headers: (200, "taken away")) as url:
        for notices in (None, url):
            settings = ElasticConfig(notices=notices)
            conditions = NodeConditions(settings, Timing.derive(1.0), 1, state, loop, appended.append)
            conditions.start()
            assert (conditions._notices is None) == (notices is None)
            if notices is not None:
                serve(loop, lambda: bool(appended))
            conditions.follow()
            conditions.close()
    loop.close()
    assert appended == [Wanted(Drain((2, 3)))]


@pytest.mark.parametrize("text", ["", "ibm", "aws=", "aws=host", "gcp=ftp://h", "ftp://h"])
def test_what_is_no_source_is_refused_by_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--elastic-notices takes aws, gcp, azure"):
        ElasticConfig(notices=text)
