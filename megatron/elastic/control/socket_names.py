"""The names of the launchers' sockets in the abstract namespace.

Launcher and ``ctl`` use the same functions, so that both mean the same job by the same run id.
"""

from __future__ import annotations

import hashlib

__all__ = ["CONSOLES", "STARTS", "console_name", "job_name", "start_name"]

CONSOLES = "megatron-elastic/"
"""Names of consoles begin with it, behind the NUL byte of the namespace."""
STARTS = "megatron-elastic-start/"
"""The same for launchers that have no console yet."""
_LONGEST = 64
"""Bytes of a job's name. A socket's name has at most 107, with one of the above and a number of ten digits."""
_DIGEST = 8
"""Bytes of the hash in the name of a job."""


def job_name(run_id: str) -> str:
    """Return ``run_id`` if a socket's name can hold it, else its beginning and a hash of the whole.

    The name of a job's name is that name, so ``ctl`` takes either for the job.
    """
    raw = run_id.encode(errors="surrogateescape")
    if len(raw) <= _LONGEST and run_id.isprintable() and run_id == run_id.strip():
        return run_id
    shown = "".join(letter if letter.isprintable() and letter != " " else "?" for letter in run_id)
    beginning = shown.encode()[: _LONGEST - 2 * _DIGEST - 1].decode(errors="ignore")
    return f"{beginning}~{hashlib.blake2b(raw, digest_size=_DIGEST, person=b'run id').hexdigest()}"


def console_name(run_id: str, node: int) -> str:
    """Address of a node's console."""
    return f"\0{CONSOLES}{job_name(run_id)}/{node}"


def start_name(run_id: str, pid: int) -> str:
    """Address of a starting launcher."""
    return f"\0{STARTS}{job_name(run_id)}/{pid}"
