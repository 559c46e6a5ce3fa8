"""A web server on the loopback address that keeps the messages it is sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Receiver", "receiver"]


class Receiver(ThreadingHTTPServer):
    """Answers each POST with the next of ``answers``, then with 204; keeps what it got."""

    def __init__(self, *answers: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers, self.got = list(answers), list[tuple[str, dict[str, Any]]]()
        self.more = threading.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook?token=hidden"

    def wait(self, count: int) -> list[tuple[str, dict[str, Any]]]:
        with self.more:
            assert self.more.wait_for(lambda: len(self.got) >= count, 60), self.got
            return list(self.got)


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.more:
            status = self.server.answers.pop(0) if self.server.answers else 204
            self.server.got.append((self.path, body))
            self.server.more.notify_all()
        self.send_response(status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Not into the output of tests."""


@contextmanager
def receiver(*answers: int) -> Iterator[Receiver]:
    server = Receiver(*answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
