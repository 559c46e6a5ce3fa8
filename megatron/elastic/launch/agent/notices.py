"""Notices that a node will be taken away: spot interruptions and maintenance, from the cloud's metadata service.

A :class:`NoticeSource` answers one question: is there a notice for this machine now? A thread asks every few seconds;
a service that does not answer delays nothing and is one line in the log. On a notice the agent asks for the drain of
its node's ranks, as ``ctl drain --ranks`` does: their state and layers move to others, spares first, while steps go on.
Where the others cannot do without these ranks, the whole job saves and ends with status 3.

Sources of the protocols: Amazon EC2, "Spot Instance interruption notices" and IMDSv2; Google Compute Engine, "Handle
preemption" and "Get live migration notices"; Azure, "Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

from megatron.elastic.config import notice_source
from megatron.elastic.control.events import Event, Wanted
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.requests import Drain
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.messages import say

__all__ = [
    "AwsSource",
    "AzureSource",
    "GcpSource",
    "NodeDrain",
    "NoticeSource",
    "NoticeThread",
    "UrlSource",
    "source_of",
]

_EVERY_SECONDS = 5.0
"""As Amazon and Google recommend."""
_ANSWER_SECONDS = 2.0
_ANSWER_BYTES = 1 << 16
_TOKEN_SECONDS = "21600"


class NoticeSource(Protocol):
    """One machine's notices."""

    def look(self) -> str:
        """Return the present notice in one line; empty: none. Raises ``OSError``: the service did not answer so."""


class _Service:
    """A metadata service at ``base``. No proxy: the service is on the machine's own link."""

    def __init__(self, base: str) -> None:
        self._base = urlsplit(base)

    def ask(
        self, path: str, headers: Mapping[str, str], method: str = "GET"
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """Return status, body and headers of the answer. Raises ``OSError``."""
        secure = self._base.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._base.hostname or "", self._base.port, timeout=_ANSWER_SECONDS)
        try:
            connection.request(method, self._base.path.rstrip("/") + path, headers=dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read(_ANSWER_BYTES).decode(errors="replace"), answer.headers
        except http.client.HTTPException as error:
            raise OSError(f"no HTTP: {error!r}") from None
        finally:
            connection.close()


def _unexpected(status: int, path: str) -> OSError:
    return OSError(f"status {status} for {path}")


class AwsSource:
    """Interruptions of an EC2 spot instance, by IMDSv2."""

    def __init__(self, base: str = "http://169.254.169.254") -> None:
        self._service, self._token = _Service(base), ""

    def look(self) -> str:
        path = "/latest/meta-data/spot/instance-action"
        status, body = self._ask(path)
        if status == 401:  # the token has run out
            self._token = ""
            status, body = self._ask(path)
        if status == 404:
            return ""
        if status != 200:
            raise _unexpected(status, path)
        found = _object(body)
        return f"spot interruption: {found.get('action', 'an action')} at {found.get('time', 'a time not told')}"

    def _ask(self, path: str) -> tuple[int, str]:
        if not self._token:
            place, lasts = "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": _TOKEN_SECONDS}
            status, body, _ = self._service.ask(place, lasts, "PUT")
            if status != 200:
                raise _unexpected(status, place)
            self._token = body.strip()
        status, body, _ = self._service.ask(path, {"X-aws-ec2-metadata-token": self._token})
        return status, body


class GcpSource:
    """Preemption of a Compute Engine VM, and maintenance that ends it. A live migration is no notice."""

    def __init__(self, base: str = "http://metadata.google.internal") -> None:
        self._service = _Service(base)

    def look(self) -> str:
        if self._value("preempted") == "TRUE":
            return "preempted"
        event = self._value("maintenance-event")
        return f"host maintenance: {event}" if event.startswith("TERMINATE") else ""

    def _value(self, name: str) -> str:
        path = f"/computeMetadata/v1/instance/{name}"
        status, body, headers = self._service.ask(path, {"Metadata-Flavor": "Google"})
        if status != 200 or headers.get("Metadata-Flavor") != "Google":
            raise _unexpected(status, path)
        return body.strip()


class AzureSource:
    """Scheduled Events of an Azure VM that end or restart it. A freeze of some seconds is no notice."""

    _ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")

    def __init__(self, base: str = "http://169.254.169.254") -> None:
        self._service, self._name = _Service(base), ""

    def look(self) -> str:
        headers = {"Metadata": "true"}
        if not self._name:  # events of the other machines of a scale set are in the same document
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            status, body, _ = self._service.ask(path, headers)
            if status != 200:
                raise _unexpected(status, path)
            self._name = body.strip()
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        status, body, _ = self._service.ask(path, headers)
        if status != 200:
            raise _unexpected(status, path)
        for event in _object(body).get("Events") or ():
            if isinstance(event, dict) and event.get("EventType") in self._ENDS and self._name in _resources(event):
                when = event.get("NotBefore") or "any moment"
                return f"scheduled event: {event['EventType']}, not before {when}"
        return ""


class UrlSource:
    """A service of the user's: status 200 with a text is a notice, an empty text, 204 or 404 is none."""

    def __init__(self, url: str) -> None:
        found = urlsplit(url)
        self._service = _Service(f"{found.scheme}://{found.netloc}")
        self._path = (found.path or "/") + (f"?{found.query}" if found.query else "")

    def look(self) -> str:
        status, body, _ = self._service.ask(self._path, {})
        if status in (204, 404):
            return ""
        if status != 200:
            raise _unexpected(status, self._path.partition("?")[0])
        return " ".join(body.split())[:200]


def source_of(setting: str) -> NoticeSource:
    """The source that ``--elastic-notices`` names. Raises ``ValueError``."""
    kind, base = notice_source(setting)
    if kind == "url":
        return UrlSource(base)
    if kind == "aws":
        return AwsSource(base) if base else AwsSource()
    if kind == "gcp":
        return GcpSource(base) if base else GcpSource()
    return AzureSource(base) if base else AzureSource()


class NoticeThread:
    """Asks ``source`` again and again, and has ``loop`` call ``heard`` with the first notice."""

    def __init__(
        self, source: NoticeSource, loop: Loop, heard: Callable[[str], None], every: float = _EVERY_SECONDS
    ) -> None:
        self._source, self._loop, self._heard, self._every = source, loop, heard, every
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no longer. A question that is under way is left behind."""
        self._done.set()

    def _serve(self) -> None:
        told = False
        while not self._done.is_set():
            try:
                notice = self._source.look()
            except (OSError, ValueError) as error:
                if not told:
                    say(
                        f"--elastic-notices: the service does not answer ({error}); it is asked every {self._every:g} s"
                    )
                told = True
            else:
                told = False
                if notice and not self._done.is_set():
                    self._loop.post(partial(self._heard, notice))
                    return
            self._done.wait(self._every)


class NodeDrain:
    """The drain of one node's ``ranks`` because of a notice. ``append``: to the journal. On the loop's thread.

    ``whole_job``: where the others cannot do without these ranks, the job saves and ends; otherwise they stay.
    """

    def __init__(
        self,
        node: str,
        ranks: tuple[int, ...],
        state: Generations,
        append: Callable[[Event], None],
        whole_job: bool = True,
    ) -> None:
        self._node, self._ranks, self._state, self._append = node, ranks, state, append
        self._whole_job = whole_job
        self._asked = self._begun = False

    def heard(self, notice: str) -> None:
        """Ask for the drain."""
        self._asked = True
        say(f"{self._node}: {notice}: its ranks {list(self._ranks)} leave, and others take their work over")
        self._append(Wanted(Drain(self._ranks)))

    def follow(self) -> None:
        """After each entry of the journal: if the others cannot do without these ranks, drain the job instead."""
        state = self._state
        if not self._asked:
            return
        if state.drain is not None:
            self._begun = bool(state.drain) and set(self._ranks) <= set(state.drain)
            return
        begun, self._begun = self._begun, False
        self._asked = not begun
        if not begun or all(state.ranks[rank].standing != "member" for rank in self._ranks):
            return
        if self._whole_job:
            say(f"{self._node}: the others cannot do without its ranks: the job saves and ends (exit status 3)")
            self._append(Wanted(Drain()))
        else:
            say(f"{self._node}: the others cannot do without its ranks: they go on")


def _object(body: str) -> dict[str, Any]:
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError(f"no JSON object: {body[:80]!r}")
    return found


def _resources(event: dict[str, Any]) -> tuple[Any, ...]:
    found = event.get("Resources")
    return tuple(found) if isinstance(found, list) else ()
