"""Messages to a URL on losses and at the end of a job (``--elastic-webhook``).

A thread of its own sends them, one after the other, each a POST of one JSON object. A slow receiver costs the job
nothing: an attempt ends after some seconds, and a message after a few attempts. The queue holds a few messages, and the
end of the launcher waits a bounded time for the last one. A message that is not delivered is a line in the log, one for
each series of failures.

The agent that coordinates the job sends, so each event is sent once; when that agent is itself lost in the same moment,
it may be sent twice or not at all. The URL often holds a token: lines name its host alone.
"""

from __future__ import annotations

import http.client
import queue
import ssl
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from megatron.elastic.control.answers import HistoryStatus, JobStatus
from megatron.elastic.control.history import LossNote
from megatron.elastic.control.status_text import duration
from megatron.elastic.control.wire import encode
from megatron.elastic.launch.messages import say

__all__ = ["Webhook", "end_message", "loss_message"]

_QUEUED = 32
_ATTEMPTS = 3
_ATTEMPT_SECONDS = 5.0
_PAUSE_SECONDS = 1.0
_CLOSE_SECONDS = 10.0


def loss_message(status: JobStatus, losses: tuple[LossNote, ...]) -> dict[str, object]:
    """The message about ``losses``, of which ``status`` is the state just after."""
    ranks = ", ".join(f"{loss.rank} on {loss.host} ({loss.cause})" for loss in losses)
    one, so_far = len(losses) == 1, status.history.losses
    counted = f"{so_far} loss{'' if so_far == 1 else 'es'} so far"
    return {
        "event": "loss",
        "text": f"job {status.run_id} lost rank{'' if one else 's'} {ranks}; {counted}",
        "losses": losses,
        **_common(status),
    }


def end_message(status: JobStatus, code: int, why: str) -> dict[str, object]:
    """The message about the end of the job with exit status ``code``."""
    after = duration(status.job_s)
    return {
        "event": "end",
        "text": f"job {status.run_id} ended with exit status {code} after {after}" + (f": {why}" if why else ""),
        "exit_status": code,
        "why": why,
        **_common(status),
        "state": "ended",  # to the control plane, a job without members is one that starts
    }


def _common(status: JobStatus) -> dict[str, object]:
    history: HistoryStatus = status.history
    return {
        "run_id": status.run_id,
        "time": round(time.time(), 3),
        "job_s": status.job_s,
        "state": status.state,
        "generation": status.generation.decided,
        "members": status.members,
        "progress": status.progress,
        "tolerance": status.tolerance.text,
        "losses_total": history.losses,
        "recoveries_total": history.recoveries,
        "mttr_s": history.mttr_s,
        "goodput": history.goodput,
        "lost_s": history.lost_s,
    }


class Webhook:
    """Sends to ``url``, which :class:`~megatron.elastic.config.ElasticConfig` has checked."""

    def __init__(self, url: str, seconds: float = _ATTEMPT_SECONDS, pause: float = _PAUSE_SECONDS) -> None:
        self._url, self._seconds, self._pause = urlsplit(url), seconds, pause
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED)
        self._failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="webhook", daemon=True)
        self._thread.start()

    def send(self, message: dict[str, object]) -> None:
        """Have the thread send ``message``; returns at once."""
        try:
            self._queue.put_nowait(encode(message))
        except queue.Full:
            self._failed("too many messages wait")

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Wait at most ``seconds`` for messages that are not sent yet, and stop."""
        self._closing.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _serve(self) -> None:
        while (body := self._queue.get()) is not None:
            why = ""
            for attempt in range(_ATTEMPTS):
                if attempt and self._closing.wait(self._pause):
                    break  # the launcher ends: one attempt a message
                why = self._try(body)
                if not why:
                    self._failing = False
                    break
            if why:
                self._failed(why)

    def _try(self, body: bytes) -> str:
        """Send once; return why that failed, or nothing."""
        try:
            return _limited(lambda: self._post(body), self._seconds)
        except RuntimeError:  # the machine has no thread left
            return "no thread can be started"

    def _post(self, body: bytes) -> str:
        host, port = self._url.hostname or "", self._url.port
        connection: http.client.HTTPConnection
        if self._url.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=self._seconds, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self._seconds)
        try:
            path = (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")
            headers = {"Content-Type": "application/json", "User-Agent": "megatron-elastic"}
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            return "" if 200 <= answer.status < 300 else f"it answers {answer.status}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            return str(error) or type(error).__name__
        finally:
            connection.close()

    def _failed(self, why: str) -> None:
        if not self._failing:
            self._failing = True
            say(f"--elastic-webhook: a message to {self._url.hostname} was not delivered ({why}); training goes on")


def _limited(call: Callable[[], str], seconds: float) -> str:
    """Return ``call()``, made on a thread of its own; a receiver that sends a byte now and then is left behind."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(call()), name="webhook-post", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else f"no answer within {seconds:g} s"
