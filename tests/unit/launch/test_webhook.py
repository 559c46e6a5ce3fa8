"""Losses and the end of a job reach a real HTTP server as JSON; a server that hangs or fails costs the job nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.launch.agent.webhook import Webhook, end_message, loss_message
from tests.receiver import receiver
from tests.unit.control.test_status_text import STATUS

LOSSES = tuple(STATUS.history.last_losses[-1:])


def test_a_loss_and_the_end_arrive_in_order_with_the_documented_fields() -> None:
    with receiver() as server:
        hook = Webhook(server.url)
        hook.send(loss_message(STATUS, LOSSES))
        hook.send(end_message(STATUS, 3, "drained"))
        hook.close()
        (path, loss), (_, end) = server.wait(2)
    assert path == "/hook?token=hidden"
    assert loss["event"] == "loss" and loss["run_id"] == "llama" and loss["losses"][0]["cause"] == "signal SIGKILL"
    assert loss["text"].startswith("job llama lost rank 3 on gpu2 (signal SIGKILL)") and loss["progress"]["step"] == 120
    assert end["event"] == "end" and end["exit_status"] == 3 and end["why"] == "drained"
    assert loss.keys() - {"losses"} == end.keys() - {"exit_status", "why"}


def test_a_server_that_fails_at_first_gets_the_message_again(capsys: pytest.CaptureFixture[str]) -> None:
    with receiver(500, 503) as server:
        hook = Webhook(server.url, pause=0.01)
        hook.send(loss_message(STATUS, LOSSES))
        assert len(server.wait(3)) == 3
        hook.close()
    assert capsys.readouterr().err == "", "it was delivered in the end"


def test_failures_are_one_line_without_the_token(capsys: pytest.CaptureFixture[str]) -> None:
    with receiver(*[500] * 6) as server:
        hook = Webhook(server.url, pause=0.01)
        for _ in range(2):
            hook.send(loss_message(STATUS, LOSSES))
        server.wait(6)
        hook.close()
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "127.0.0.1 was not delivered (it answers 500); training goes on" in told
    assert "hidden" not in told


@contextmanager
def hanging(trickles: bool) -> Iterator[int]:
    """A server that takes connections and never answers, or sends one byte of an answer now and then."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            kept = []
            while not done.is_set():
                try:
                    kept.append(listener.accept()[0])
                except OSError:
                    return
                while trickles and not done.wait(0.05):
                    try:
                        kept[-1].sendall(b"H")
                    except OSError:
                        break

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        done.set()
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("trickles", [False, True])
def test_a_server_that_hangs_delays_neither_a_message_nor_the_end_for_long(
    trickles: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with hanging(trickles) as port:
        hook = Webhook(f"http://127.0.0.1:{port}/", seconds=0.5, pause=0.01)
        began = time.monotonic()
        for _ in range(40):  # more than are kept
            hook.send(loss_message(STATUS, LOSSES))
        sent = time.monotonic()
        hook.close(seconds=2.0)
        closed = time.monotonic()
    # 40 messages with three attempts each, waited for, would take a minute.
    assert sent - began < 20 and closed - sent < 20
    assert capsys.readouterr().err.count("training goes on") == 1


@pytest.mark.parametrize("url", ["ftp://host/x", "host/x", "http://", "http://host:port/", "http://u@[::1/"])
def test_what_is_no_url_is_refused_by_flag(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--elastic-webhook takes an http:// or https:// URL"):
        ElasticConfig(webhook=url)
