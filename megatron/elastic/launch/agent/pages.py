"""The pages that an agent serves to users: metrics (``--elastic-metrics``) and the live page (``--elastic-dashboard``).

Each agent serves its own, so a job that loses its first node keeps them. An agent whose port is taken, such as the
second launcher on one machine, says so in one line and trains on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from megatron.elastic.config import ElasticConfig, web_address
from megatron.elastic.control.wire import encode
from megatron.elastic.launch.agent.admin import Sources
from megatron.elastic.launch.agent.web import Route, Shown, WebContent, WebServer
from megatron.elastic.launch.messages import say

__all__ = ["Pages", "state_json"]

_PAGE = Path(__file__).with_name("page")
_FILES = {"/": "index.html", "/dashboard.js": "dashboard.js", "/dashboard.css": "dashboard.css"}
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


class Pages:
    """Of one agent. Nothing is opened, or imported for it, where no setting asks for it."""

    def __init__(self, settings: ElasticConfig, token: str, sources: Sources) -> None:
        self._sources = sources
        self._servers: list[WebServer] = []
        wanted: dict[tuple[str, int], dict[str, Route]] = {}
        for text, routes in ((settings.dashboard, _dashboard), (settings.metrics, _metrics)):
            if text is not None:
                wanted.setdefault(web_address(text), {}).update(routes())
        for address, found in wanted.items():
            self._open(address, token, found)

    def _open(self, address: tuple[str, int], token: str, routes: Mapping[str, Route]) -> None:
        host, port = address
        where = f"[{host}]" if ":" in host else host
        try:
            server = WebServer(address, token, routes)
        except OSError as error:
            why = error.strerror or error
            say(f"{where}:{port} cannot be listened at ({why}): this launcher serves no page or metrics")
            return
        self._servers.append(server)
        path = "" if "/" in routes else "metrics"
        needs = " (needs the token of --elastic-web-token-file)" if token else ""
        say(f"{'live page' if '/' in routes else 'metrics'} at http://{where}:{server.port}/{path}{needs}")

    def beat(self) -> None:
        """Show the present state from now on."""
        if self._servers:
            now, samples = time.monotonic(), tuple(self._sources.meter.samples)
            shown = Shown(self._sources.status(), samples, self._sources.topology(), now)
            for server in self._servers:
                server.show(shown)

    def close(self) -> None:
        """Stop serving."""
        for server in self._servers:
            server.close()
        self._servers = []


def state_json(shown: Shown, accept: str = "") -> WebContent:
    """The data of the page: status, topology and the newest steps, with times in seconds of the job."""
    offset = shown.status.job_s - shown.now
    samples = [
        {
            "at": round(sample.at + offset, 3),
            "step": sample.step.step,
            "seconds": _finite(sample.step.seconds),
            "loss": _finite(sample.step.loss),
        }
        for sample in shown.samples
    ]
    state = {"status": shown.status, "topology": shown.topology, "samples": samples}
    return WebContent(encode(state), "application/json")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _dashboard() -> dict[str, Route]:
    files = {path: Route(partial(_file, name), public=True) for path, name in _FILES.items()}
    return {**files, "/state.json": Route(state_json), **_metrics()}


def _metrics() -> dict[str, Route]:
    from megatron.elastic.launch.agent.metrics import exposition  # an agent without pages need not load its library

    make: Callable[[Shown, str], WebContent] = exposition
    return {"/metrics": Route(make)}


def _file(name: str, shown: Shown, accept: str) -> WebContent:
    path = _PAGE / name
    return WebContent(path.read_bytes(), f"{_KINDS[path.suffix]}; charset=utf-8")
