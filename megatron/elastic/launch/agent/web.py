"""A small HTTP server beside an agent's loop: metrics, and the page of ``--elastic-dashboard``.

A request is answered on a thread of its own, from the newest :class:`Shown` that the loop has left. So it waits for no
worker and not even for the loop. The server only reads: nothing that it is sent reaches the job.

Access. With a token every request for data needs ``Authorization: Bearer TOKEN``. Without one the server listens on
the loopback address only, and answers only requests that name a loopback host. So no web page of another origin reads
it through the name of a host (DNS rebinding). Files of the page hold no data and need no token.

A client holds one of a few connections for a few seconds at most; when all are taken, a new one is closed.
"""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit

from megatron.elastic.config import LOOPBACK
from megatron.elastic.control.answers import JobStatus
from megatron.elastic.control.observations import DrawnTopology
from megatron.elastic.launch.agent.step_meter import StepSample

__all__ = ["Route", "Shown", "WebContent", "WebServer"]

_CONNECTIONS = 16
_SECONDS = 5.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Shown:
    """An agent's knowledge at one moment. ``now``: that moment by the clock of the samples."""

    status: JobStatus
    samples: tuple[StepSample, ...] = ()
    topology: DrawnTopology | None = None
    now: float = 0.0


@dataclass(frozen=True)
class WebContent:
    """The body of an answer."""

    body: bytes
    kind: str


@dataclass(frozen=True)
class Route:
    """Makes the content of one path. ``accept``: the request's ``Accept`` header; ``public``: needs no token."""

    make: Callable[[Shown, str], WebContent]
    public: bool = False


class WebServer:
    """Listens at ``address`` from the start. Raises ``OSError``. ``token``: empty for none."""

    def __init__(self, address: tuple[str, int], token: str, routes: Mapping[str, Route]) -> None:
        self._shown: Shown | None = None
        self._server = _Server(address, token, routes, lambda: self._shown)
        threading.Thread(target=self._server.serve_forever, name="web", daemon=True).start()

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return int(self._server.socket.getsockname()[1])

    def show(self, shown: Shown) -> None:
        """Answer requests from ``shown`` from now on."""
        self._shown = shown

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingMixIn, TCPServer):
    """Not ``http.server``'s own class, which looks the name of its address up: a resolver may not answer."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        routes: Mapping[str, Route],
        shown: Callable[[], Shown | None],
    ) -> None:
        self.token, self.routes, self.shown = token, routes, shown
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the machine has no thread left
            self._free.release()
            raise  # the caller closes the connection

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # A client that sends a byte now and then would otherwise keep its connection for ever.
        limit = threading.Timer(2 * _SECONDS, _cut, (request,))
        limit.daemon = True
        try:
            limit.start()
            super().process_request_thread(request, client_address)
        except RuntimeError:  # as above
            self.shutdown_request(request)
        finally:
            limit.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


def _cut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "megatron-elastic", ""
    timeout = _SECONDS

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """The launcher's output is not the place for requests."""

    def _answer(self, body: bool) -> None:
        route, shown = self.server.routes.get(self.path.partition("?")[0]), self.server.shown()
        if not self.server.token and not self._names_loopback():
            status, why = HTTPStatus.FORBIDDEN, "without a token only loopback host names are answered\n"
        elif route is None:
            status, why = HTTPStatus.NOT_FOUND, "no such page\n"
        elif not route.public and not self._authorized():
            status, why = HTTPStatus.UNAUTHORIZED, "a token is needed: Authorization: Bearer TOKEN\n"
        elif shown is None:
            status, why = HTTPStatus.SERVICE_UNAVAILABLE, "the agent is starting\n"
        else:
            try:
                content = route.make(shown, self.headers.get("Accept", ""))
            except Exception as error:  # a fault of this package: who asked learns of it, and the job goes on
                status, why = HTTPStatus.INTERNAL_SERVER_ERROR, f"this page was not made: {error!r}\n"
            else:
                self._send(HTTPStatus.OK, content, body)
                return
        self._send(status, WebContent(why.encode(), "text/plain; charset=utf-8"), body)

    def _names_loopback(self) -> bool:
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname in LOOPBACK
        except ValueError:  # a bracket without the other one
            return False

    def _authorized(self) -> bool:
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self.server.token.encode())
        return not self.server.token or (scheme.lower() == "bearer" and right)

    def _send(self, status: HTTPStatus, content: WebContent, body: bool) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", content.kind)
        self.send_header("Content-Length", str(len(content.body)))
        self.end_headers()
        if body:
            self.wfile.write(content.body)
