"""The output of workers: torchrun's --redirects, --tee and --log-dir, with torch's own parts.

torch decides the paths (``DefaultLogsSpecs``) and tails the files (``TailLog``).
Files are opened for appending: a rank's later incarnations write on below the
earlier ones, and the last lines of a lost one are found at the file's end.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from string import Template

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from megatron.elastic.launch.arguments import BadCommand, JobSpec
from megatron.elastic.launch.messages import say

__all__ = ["WorkerLogs"]

_TAIL_BYTES = 1 << 14
_CLOSE_SECONDS = 10.0


class WorkerLogs:
    """Output of one node's workers, by local rank. Raises :class:`BadCommand` when its files cannot be made."""

    def __init__(self, job: JobSpec, ranks: tuple[int, ...]) -> None:
        count = len(ranks)
        self._out = dict.fromkeys(range(count), "")
        self._err = dict.fromkeys(range(count), "")
        self.error_files: dict[int, str] = {}
        self._tails: list[TailLog] = []
        if job.logs is None:
            hidden = [local for local in range(count) if job.shown is not None and local not in job.shown]
            for local in hidden:
                self._out[local] = self._err[local] = os.devnull
            return
        named = {"TORCHELASTIC_RUN_ID": job.run_id, "TORCHELASTIC_RESTART_COUNT": "0"}
        try:
            files = DefaultLogsSpecs(job.logs.folder, job.logs.redirects, job.logs.tee, set(job.shown or ()) or None)
            where = files.reify({local: dict(named) for local in range(count)})
        except OSError as error:
            raise BadCommand(
                f"the output of workers cannot be written to files ({error}): choose another --log-dir"
            ) from None
        if not job.logs.folder:
            say(f"the output of workers is in {files.root_log_dir} (--log-dir sets another directory)")
        self._out, self._err, self.error_files = where.stdouts, where.stderrs, where.error_files
        prefixes = _prefixes(job, ranks)
        self._tails = [
            TailLog(job.role, where.tee_stdouts, sys.stdout, prefixes).start(),
            TailLog(job.role, where.tee_stderrs, sys.stderr, prefixes).start(),
        ]

    def open(self, local_rank: int) -> tuple[int, int]:
        """Descriptors for a worker's standard output and error; the caller closes them."""
        return _open(self._out[local_rank], 1), _open(self._err[local_rank], 2)

    def last_lines(self, local_rank: int, count: int = 10) -> tuple[str, ...]:
        """The end of what the worker wrote to files, standard error before standard output; may be nothing."""
        for path in (self._err[local_rank], self._out[local_rank]):
            lines = _tail(path, count)
            if lines:
                return lines
        return ()

    def close(self) -> None:
        """Print what is not printed yet and stop; a console that is not read delays this for a bounded time."""

        def stop() -> None:
            for tail in self._tails:
                tail.stop()

        stopping = threading.Thread(target=stop, name="tails", daemon=True)
        stopping.start()
        stopping.join(_CLOSE_SECONDS)


def _prefixes(job: JobSpec, ranks: tuple[int, ...]) -> dict[int, str] | None:
    if job.line_prefix is None:
        return None
    template = Template(job.line_prefix)
    return {
        local: template.safe_substitute(role_name=job.role, rank=rank, local_rank=local)
        for local, rank in enumerate(ranks)
    }


def _open(path: str, console: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if path else os.dup(console)


def _tail(path: str, count: int) -> tuple[str, ...]:
    if not path or path == os.devnull:
        return ()
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        return tuple(line for line in lines if line.strip())[-count:]
    return ()
