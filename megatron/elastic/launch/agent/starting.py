"""The launcher's answer to ``ctl doctor`` until it has a console: what it waits for, and for how long.

A thread answers each connection from the newest note and closes it. Callers must be of the same user (or root), as the
kernel tells. A caller that does not read delays the next one by a second at most, and the launcher not at all.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from megatron.elastic.control.socket_names import start_name
from megatron.elastic.control.starting import StartStatus, fingerprint
from megatron.elastic.control.wire import frame, printable
from megatron.elastic.launch.arguments import JobSpec
from megatron.elastic.launch.limits import files_needed
from megatron.elastic.launch.messages import waiting_for

__all__ = ["Starting"]

_CALLERS = 4
_SECONDS = 1.0


class Starting:
    """Of one launcher. :meth:`close` ends it; a launcher that ends takes the socket along."""

    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self._doing, self._since = "starting", time.monotonic()
        self.node = -1 if job.node is None else job.node
        self.serves = False
        """True once this launcher serves the job's store."""
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(start_name(job.run_id, os.getpid()))
            self._socket.listen(_CALLERS)
        except OSError:  # a job whose start the doctor does not see starts all the same
            self._socket.close()
            self._socket = None
            return
        threading.Thread(target=self._serve, args=(self._socket,), name="starting", daemon=True).start()

    def note(self, doing: str) -> None:
        """From now on the launcher does ``doing``."""
        self._doing, self._since = doing, time.monotonic()

    def specify(self, doing: str) -> None:
        """The same as before, in other words."""
        self._doing = doing

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """The launcher waits for ``what`` inside; a line says so, at growing intervals."""
        self.note(f"waits for {what}")
        with waiting_for(what):
            yield
        self.note("goes on")

    def status(self) -> StartStatus:
        """The answer to a caller."""
        job = self._job
        if job.etcd is not None:
            store = tuple(job.etcd.endpoints)
        elif job.nodes == 1:
            store = ()
        else:
            store = ((job.master_addr, job.master_port),)
        return StartStatus(
            run_id=printable(job.run_id),
            pid=os.getpid(),
            host=printable(job.local_addr),
            doing=printable(self._doing),
            seconds=round(time.monotonic() - self._since, 1),
            node=self.node,
            least=job.least,
            workers=job.workers,
            store=store,
            serves=self.serves,
            secret=fingerprint(job.secret),
            files=files_needed(job.nodes, job.workers),
        )

    def close(self) -> None:
        """Answer no longer: the console does from now on."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._socket.close()
            self._socket = None

    def _serve(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                caller, _ = listener.accept()
                with caller, suppress(OSError):
                    caller.settimeout(_SECONDS)
                    peer = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                    if struct.unpack("3i", peer)[1] in (os.getuid(), 0):
                        caller.sendall(frame(self.status()))
