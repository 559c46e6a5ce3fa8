"""The job's secrets: from files or the environment.

Every process of a job knows the job's own secret, and proves so in each handshake and signature; it never travels. The
agents of several nodes cannot agree on one over a network they do not trust, so it is given to each of them by whatever
starts them. A job that is on one node makes its own. The others are the launchers' alone: the token of their pages, and
the URL for messages.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping

from megatron.elastic.config import is_web_url
from megatron.elastic.control import env

__all__ = ["LEAST_BYTES", "job_secret", "web_token", "webhook_url"]

LEAST_BYTES = 16
"""A shorter one could be guessed from one recorded handshake."""
_MAKE = "openssl rand -hex 16"
_LONGEST_BYTES = 4096


def job_secret(file: str | None, environ: Mapping[str, str], alone: bool) -> str:
    """The secret in hex digits. ``file``: ``--elastic-secret-file``; ``alone``: no other agent has to know it.

    Raises ValueError with one line that names the flag and the fix.
    """
    path = file or environ.get(env.SECRET_FILE)
    if path:
        source = "--elastic-secret-file" if file else env.SECRET_FILE
        return _checked(_read(path, source), f"{source} {path}")
    given = environ.get(env.SECRET)
    if given:
        return _checked(given, env.SECRET)
    if alone:
        return secrets.token_hex(LEAST_BYTES)
    raise ValueError(
        f"agents that meet over a network need a secret: {_MAKE} > FILE, chmod 600 FILE, give every node a copy and "
        f"--elastic-secret-file FILE (or the same {env.SECRET} in its environment)"
    )


def web_token(path: str) -> str:
    """The token of ``--elastic-web-token-file``. Raises ValueError with one line that names the flag and the fix."""
    token = _read(path, "--elastic-web-token-file")
    if (
        not LEAST_BYTES <= len(token) <= _LONGEST_BYTES
        or not token.isascii()
        or not token.isprintable()
        or " " in token
    ):
        raise ValueError(
            f"--elastic-web-token-file {path} must hold at least {LEAST_BYTES} printable characters "
            f"without blanks: {_MAKE}"
        )
    return token


def webhook_url(url: str | None, file: str | None, environ: Mapping[str, str]) -> str:
    """The URL for messages; empty: none. ``url``: ``--elastic-webhook``; ``file``: ``--elastic-webhook-file``.

    Raises ValueError with one line that names the flag and the fix, and not the URL, which may hold a token.
    """
    if url is not None:
        return url
    source = f"--elastic-webhook-file {file}" if file else env.WEBHOOK
    text = _read(file, "--elastic-webhook-file", "write the URL to it") if file else environ.get(env.WEBHOOK, "")
    if (file or text) and not (
        len(text) <= _LONGEST_BYTES and text.isprintable() and " " not in text and is_web_url(text)
    ):
        raise ValueError(f"{source} must hold one http:// or https:// URL with a host")
    return text


def _read(path: str, source: str, fix: str = f"make one with {_MAKE}") -> str:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{source} {path}: not a file")
            if status.st_mode & 0o077 or status.st_uid not in (os.getuid(), 0):
                raise ValueError(f"{source} {path}: others can read or own it: chmod 600 {path}")
            return file.read(_LONGEST_BYTES + 1).decode("ascii", "replace").strip()
    except OSError as error:
        raise ValueError(f"{source} {path}: {error.strerror}: {fix}") from None


def _checked(text: str, source: str) -> str:
    try:
        if len(bytes.fromhex(text)) >= LEAST_BYTES and len(text) <= _LONGEST_BYTES and not any(map(str.isspace, text)):
            return text.lower()
    except ValueError:
        pass
    raise ValueError(f"{source} must hold at least {2 * LEAST_BYTES} hex digits, an even number of them: {_MAKE}")
