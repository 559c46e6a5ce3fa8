"""An agent's pages over real sockets: who gets what, and that no client or worker delays another request."""

from __future__ import annotations

import dataclasses
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from megatron.elastic.config import ConfigError, ElasticConfig, web_address
from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.membership import Committed
from megatron.elastic.control.nodes import Node
from megatron.elastic.launch.agent.admin import Sources
from megatron.elastic.launch.agent.metrics import exposition
from megatron.elastic.launch.agent.pages import Pages, state_json
from megatron.elastic.launch.agent.step_meter import StepMeter, StepSample
from megatron.elastic.launch.agent.web import Route, Shown, WebContent, WebServer
from megatron.elastic.launch.secret import web_token
from tests.unit.control.test_status_text import STATUS

SHOWN = Shown(STATUS, (StepSample(90.0, Committed(7, 9, 56, 0.5, float("nan"))),), None, 100.0)
TOKEN = "a token of 20 chars!".replace(" ", "-")


@contextmanager
def server(token: str = "", shown: Shown | None = SHOWN) -> Iterator[int]:
    routes = {
        "/": Route(lambda shown, accept: WebContent(b"page", "text/html"), public=True),
        "/metrics": Route(exposition),
        "/state.json": Route(state_json),
        "/broken": Route(lambda shown, accept: WebContent(accept.encode("ascii"), "text/plain")),
    }
    web = WebServer(("127.0.0.1", 0), token, routes)
    if shown is not None:
        web.show(shown)
    yield web.port
    web.close()


def get(port: int, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> tuple[int, bytes, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers=headers or {})
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.headers.get("Content-Type", "")
    connection.close()
    return found


def exchanged(port: int, request: bytes) -> bytes:
    """All bytes of the answer."""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def test_metrics_are_openmetrics_that_a_parser_of_others_reads() -> None:
    with server() as port:
        status, body, kind = get(port, "/metrics", {"Accept": "application/openmetrics-text; version=1.0.0"})
        plain = get(port, "/metrics")
    assert status == 200 and kind.startswith("application/openmetrics-text") and body.endswith(b"# EOF\n")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    assert samples["megatron_elastic_losses_total",] == 1 and samples["megatron_elastic_step",] == 120
    assert samples["megatron_elastic_lost_seconds_total", "computed again"] == 1.2
    assert samples["megatron_elastic_recovery_seconds_total",] == pytest.approx(0.184)
    assert samples["megatron_elastic_ranks", "member"] == 3 and samples["megatron_elastic_goodput_ratio",] == 0.9931
    assert samples["megatron_elastic_state", "training"] == 1 and samples["megatron_elastic_state", "starting"] == 0
    assert samples["megatron_elastic_expert_rank_load_ratio",] == 1.321
    assert samples["megatron_elastic_expert_load_ratio", "4"] == 3.104
    assert plain[2].startswith("text/plain") and b"megatron_elastic_losses_total 1.0" in plain[1]


def test_a_job_without_experts_has_no_metric_of_them() -> None:
    dense = dataclasses.replace(SHOWN, status=msgspec.structs.replace(STATUS, expert_loads=None))
    assert b"expert" in exposition(SHOWN, "").body and b"expert" not in exposition(dense, "").body


def test_data_needs_the_token_and_the_page_that_asks_for_it_does_not() -> None:
    with server(TOKEN) as port:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
            for path in ("/metrics", "/state.json", f"/state.json?token={TOKEN}"):
                status, body, _ = get(port, path, headers)
                assert status == 401 and b"llama" not in body
        assert get(port, "/metrics", {"Authorization": f"Bearer {TOKEN}", "Host": "gpu1:80"})[0] == 200
        assert get(port, "/", {"Host": "gpu1:80"})[:2] == (200, b"page")


def test_without_a_token_a_page_of_another_origin_learns_nothing_by_a_host_name() -> None:
    with server() as port:
        assert get(port, "/state.json", {"Host": "attacker.example:80"})[0] == 403
        assert get(port, "/state.json", {"Host": "localhost.attacker.example:80"})[0] == 403
        for host in (f"localhost:{port}", "localhost", "LOCALHOST", "127.0.0.1", "[::1]", "[::1]:80"):
            assert get(port, "/state.json", {"Host": host})[0] == 200, host
        for host in ("", "[::1", "::1]:80"):
            assert get(port, "/state.json", {"Host": host})[0] == 403, host


def test_a_page_that_cannot_be_made_is_answered_all_the_same() -> None:
    with server() as port:
        status, body, _ = get(port, "/broken", {"Accept": "\u00e9"})
        assert status == 500 and b"UnicodeEncodeError" in body
        assert get(port, "/metrics")[0] == 200


def test_other_requests_have_no_effect() -> None:
    with server() as port:
        assert get(port, "/../../etc/passwd")[0] == 404
        assert get(port, "/metrics", method="POST")[0] == 501
        assert get(port, "/metrics", method="HEAD")[:2] == (200, b"")
        assert exchanged(port, b"HEAD /nothing HTTP/1.0\r\nHost: localhost\r\n\r\n").endswith(b"\r\n\r\n")
    with server(shown=None) as port:
        assert get(port, "/metrics")[0] == 503, "the agent is starting"


def test_clients_that_say_nothing_do_not_keep_others_from_their_answer() -> None:
    with server() as port:
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(10)]
        assert get(port, "/metrics")[0] == 200
        more = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]
        for connection in (*silent, *more):  # within a few seconds each is closed
            connection.settimeout(60)
            with connection:
                try:
                    connection.recv(1)
                except ConnectionResetError:
                    continue
        assert get(port, "/metrics")[0] == 200


def test_a_machine_that_has_no_thread_left_for_a_while_does_not_use_up_the_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with server() as port:
        for kind in (threading.Timer, threading.Thread):
            with monkeypatch.context() as full:
                full.setattr(kind, "start", refused)
                for _ in range(20):
                    with socket.create_connection(("127.0.0.1", port), 60) as connection:
                        assert connection.recv(1) == b"", "closed without an answer"
            assert get(port, "/metrics")[0] == 200


def test_no_name_is_looked_up_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that does not answer would hold up the launcher."""
    monkeypatch.setattr(socket, "getfqdn", lambda name="": pytest.fail(f"looked up {name}"))
    with server() as port:
        assert get(port, "/metrics")[0] == 200


def test_a_scrape_is_answered_while_the_agent_itself_does_not_run() -> None:
    """The loop has left a status once. It does not run now, and there is no worker to ask."""
    never = threading.Event()
    sources = Sources("job", Generations({0: Node("h", (0,))}), JobHistory(), JobClock(), StepMeter())
    pages = Pages(ElasticConfig(metrics="0"), "", sources)
    pages.beat()
    object.__setattr__(sources, "table", never.wait)
    assert get(pages._servers[0].port, "/metrics")[0] == 200
    pages.close()


def test_one_port_serves_page_and_metrics_and_a_taken_one_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    sources = Sources("job", Generations({0: Node("h", (0,))}), JobHistory(), JobClock(), StepMeter())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        Pages(ElasticConfig(metrics=str(port)), "", sources).close()
        assert f"127.0.0.1:{port} cannot be listened at" in capsys.readouterr().err
    pages = Pages(ElasticConfig(dashboard="0", metrics="127.0.0.1:0"), "", sources)
    pages.beat()
    (only,) = pages._servers
    assert {path: get(only.port, path)[0] for path in ("/", "/dashboard.js", "/dashboard.css", "/metrics")} == {
        "/": 200,
        "/dashboard.js": 200,
        "/dashboard.css": 200,
        "/metrics": 200,
    }
    pages.close()
    assert "live page at http://127.0.0.1:" in capsys.readouterr().err


def test_the_data_of_the_page_has_times_of_the_job_and_no_number_that_json_lacks() -> None:
    found = json.loads(state_json(SHOWN).body)
    assert found["samples"] == [{"at": STATUS.job_s - 10.0, "step": 7, "seconds": 0.5, "loss": None}]
    assert found["status"]["run_id"] == "llama" and found["topology"] is None


@pytest.mark.parametrize(
    ("text", "address"),
    [("8080", ("127.0.0.1", 8080)), ("0.0.0.0:80", ("0.0.0.0", 80)), ("[::1]:0", ("::1", 0))],
)
def test_an_address_is_loopback_unless_it_is_given(text: str, address: tuple[str, int]) -> None:
    assert web_address(text) == address


@pytest.mark.parametrize("text", ["", "x", "host:", ":80", "99999", "-1"])
def test_what_is_no_address_is_refused_by_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--elastic-dashboard takes PORT or ADDRESS:PORT"):
        ElasticConfig(dashboard=text)


def test_an_address_that_others_reach_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--elastic-metrics 0.0.0.0:80 .*--elastic-web-token-file"):
        ElasticConfig(metrics="0.0.0.0:80")
    file = tmp_path / "token"
    assert ElasticConfig(metrics="0.0.0.0:80", web_token_file=str(file)).metrics
    for text, mode, fault in ((TOKEN, 0o644, "chmod 600"), ("short", 0o600, "at least 16"), (TOKEN, 0o600, "")):
        file.write_text(text + "\n")
        file.chmod(mode)
        if fault:
            with pytest.raises(ValueError, match=fault):
                web_token(str(file))
        else:
            assert web_token(str(file)) == TOKEN
