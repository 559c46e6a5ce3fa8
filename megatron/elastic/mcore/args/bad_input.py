"""Bad input, which ends a run with exit code 1 and one line that names the flag and the fix.

Megatron reports most bad input as an ``AssertionError`` deep in a stack, some without
a text. Checks of this package raise :class:`BadInput`; :func:`translated` translates
Megatron's own. :func:`install_hook` prints both as one line instead of a traceback; any
other exception keeps its traceback.
"""

from __future__ import annotations

import functools
import linecache
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron.elastic.config import ConfigError
from megatron.elastic.platform.base import PlatformUnavailable
from megatron.elastic.platform.cpu_redirect import RedirectionTooLate

__all__ = [
    "EXIT_CODE",
    "BadInput",
    "Faults",
    "explain_assertion",
    "install_hook",
    "port_in_use_named",
    "translated",
    "unreadable_named",
    "unwritable_cache_named",
]

EXIT_CODE = 1


class BadInput(ValueError):
    """Invalid settings or data: one text a fault.

    ``rank0_only``: every rank finds the same faults, and rank 0 alone prints them.
    """

    def __init__(self, *texts: str, rank0_only: bool = True) -> None:
        super().__init__("; ".join(texts))
        self.texts = texts
        self.rank0_only = rank0_only


class Faults:
    """The bad input found so far, to be reported together."""

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}
        self._rank0_only = True

    def __bool__(self) -> bool:
        return bool(self._texts)

    def add(self, *texts: str, rank0_only: bool = True) -> None:
        """Add texts, each once."""
        self._texts.update(dict.fromkeys(texts))
        self._rank0_only = self._rank0_only and (rank0_only or not texts)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add a :class:`BadInput` or :class:`ConfigError` of the body instead of raising it."""
        try:
            yield
        except BadInput as error:
            self.add(*error.texts, rank0_only=error.rank0_only)
        except ConfigError as error:
            self.add(*error.texts)

    def raise_if_any(self) -> None:
        """Raise one :class:`BadInput` with all texts, if there are any."""
        if self._texts:
            raise BadInput(*self._texts, rank0_only=self._rank0_only)


def explain_assertion(error: AssertionError) -> str:
    """Return the text of a failed assertion, or the asserted source if it has none."""
    text = " ".join(str(error).split())
    if text:
        return text
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return "a check on the flags failed"
    source = linecache.getline(frame.tb_frame.f_code.co_filename, frame.tb_lineno).strip()
    flags = dict.fromkeys("--" + name.replace("_", "-") for name in re.findall(r"\bargs\.(\w+)", source))
    see = f": change {' or '.join(flags)}" if flags else ""
    return f"Megatron's check `{source.removeprefix('assert ').rstrip(', ')}` of the flags failed{see}"


@contextmanager
def translated(*kinds: type[Exception]) -> Iterator[None]:
    """Turn Megatron's ``AssertionError`` (and ``kinds``) on its arguments into :class:`BadInput`."""
    try:
        yield
    except AssertionError as error:
        raise BadInput(explain_assertion(error)) from error
    except kinds as error:
        raise BadInput(" ".join(str(error).split())) from error


_DAMAGED = (AssertionError, OSError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile)
"""Errors that readers of checkpoints raise for a missing or truncated file."""
_DAMAGED_WORDS = ("PytorchStreamReader", "unknown checkpoint format")
"""Texts of such errors with a general type: torch's for a truncated file, Megatron's for an empty folder."""


@contextmanager
def unreadable_named(flag: str, folder: str) -> Iterator[None]:
    """Turn errors of a damaged or incomplete checkpoint in ``folder`` into :class:`BadInput`.

    Megatron's assertions that it fits the flags are turned too. Errors of a lost rank pass unchanged.
    """
    try:
        with translated():
            yield
    except (Exception, CheckpointException) as error:
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        if not all(isinstance(cause, _DAMAGED) or any(w in str(cause) for w in _DAMAGED_WORDS) for cause in causes):
            raise
        why = " ".join(f"{type(causes[0]).__name__} {causes[0]}".split())[:120]
        raise BadInput(
            f"{flag} {folder}: the checkpoint cannot be read ({why}), it is truncated or damaged: choose another step "
            "(--ckpt-step) or another folder"
        ) from error


@contextmanager
def unwritable_cache_named(folder: str | None) -> Iterator[None]:
    """Turn Megatron's error for data indices that cannot be written into :class:`BadInput`."""
    try:
        yield
    except Exception as error:
        if "data cache directory" not in str(error):
            raise
        where = f"--data-cache-path {folder}" if folder else "the folder of --data-path"
        why = error.__cause__ or error.__context__
        raise BadInput(
            f"{where}: indices of the data cannot be written ({why}): free space, or give another --data-cache-path"
        ) from error


@contextmanager
def port_in_use_named() -> Iterator[None]:
    """Turn torch's error for a rendezvous port in use into :class:`BadInput`; other errors pass."""
    try:
        yield
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            raise
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        raise BadInput(
            f"{where} is in use by another process: choose another --master-port (MASTER_PORT)", rank0_only=False
        ) from error


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None, otherwise: object) -> None:
    if isinstance(error, BadInput | ConfigError | PlatformUnavailable | RedirectionTooLate):
        if not getattr(error, "rank0_only", True) or os.environ.get("RANK", "0") == "0":
            for text in getattr(error, "texts", None) or (str(error),):
                print(f"error: {text}", file=sys.stderr, flush=True)
        return
    assert callable(otherwise)
    otherwise(kind, error, trace)


def install_hook() -> None:
    """Print bad input as one line (the interpreter then exits with code 1). Idempotent."""
    present = sys.excepthook
    if not (isinstance(present, functools.partial) and present.func is _report):
        sys.excepthook = functools.partial(_report, otherwise=present)
