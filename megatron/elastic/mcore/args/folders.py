"""Checks of the folders that a run reads and writes, before the model is built.

Megatron finds a folder that cannot be written only at the first save, hours later, and ends with status 0
if a tracker file names no checkpoint. The checks leave no files: they make an unnamed file in a
folder, or, if the file system has no unnamed files, an empty folder that is removed at once.

A newcomer to a running job is not checked: the job writes its checkpoints without it.
"""

from __future__ import annotations

import errno
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.elastic.control import env
from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.args.preflight import data_prefixes

__all__ = ["TRACKER", "check_folders", "non_persistent_folder", "why_not_writable"]

_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
"""Errors of file systems without O_TMPFILE (open(2))."""

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file in a folder of checkpoints that names the newest step."""
_NON_PERSISTENT = "non_persistent"
"""Megatron's folder for checkpoints of ``--non-persistent-save-interval``, beside the other ones."""


def non_persistent_folder(args: Any, beside: str) -> str | None:
    """Return the folder of non-persistent checkpoints, where others lie in ``beside``; None if none are kept."""
    if getattr(args, "non_persistent_ckpt_type", None) != "global":
        return None
    return args.non_persistent_global_ckpt_dir or os.path.join(beside, _NON_PERSISTENT)


def check_folders(args: Namespace, environ: Mapping[str, str] = os.environ) -> None:
    """Raise one :class:`BadInput` for all folders of ``args`` that cannot be read or written as required."""
    if environ.get(env.NEWCOMER) == "1" or environ.get(env.INCARNATION, "0") != "0":
        return
    faults = (*_unwritable(args), *_uncached(args), *_untracked(args))
    if faults:
        raise BadInput(*faults)


def _unwritable(args: Namespace) -> Iterator[str]:
    event_log = getattr(args, "elastic_event_log", None) if args.elastic else None
    for flag, folder in (
        ("--save", args.save),
        ("--non-persistent-global-ckpt-dir", args.save and getattr(args, "non_persistent_global_ckpt_dir", None)),
        ("--tensorboard-dir", args.tensorboard_dir),
        ("--elastic-event-log", event_log),
    ):
        why = why_not_writable(Path(folder)) if folder and "://" not in folder else ""
        if why:
            yield f"{flag} {folder} cannot be written to ({why}): give another folder, or change its permissions"


def _uncached(args: Namespace) -> Iterator[str]:
    """Yield folders for indices of the data that rank 0 would have to make and cannot. Others may be complete."""
    if args.rank != 0 or args.mock_data or getattr(args, "sft", False):
        return
    if args.data_cache_path:
        why = _why_not_made(Path(args.data_cache_path))
        if why:
            yield f"--data-cache-path {args.data_cache_path} cannot be made ({why}): give another folder"
        return
    with suppress(BadInput):  # the check of the data tells it
        for flag, prefix in data_prefixes(args):
            why = "" if "://" in prefix else _why_not_made(Path(prefix) / "cache")
            if why:
                yield f"{flag} {prefix}: indices of the data cannot be kept beside it ({why}): give --data-cache-path"


def _why_not_made(folder: Path) -> str:
    """Return why a folder that is not there cannot be made; empty if it is there or can be made."""
    return "" if folder.is_dir() else why_not_writable(folder)


def why_not_writable(folder: Path) -> str:
    """Return why no file can be made in ``folder``, which need not exist yet; empty if one can. Leaves no files."""
    existing = folder.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is not a folder"
    try:
        os.close(os.open(existing, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno not in _NO_UNNAMED_FILES:
            return f"{existing}: {error.strerror}"
        try:
            os.rmdir(tempfile.mkdtemp(prefix=".elastic-", dir=existing))
        except OSError as refused:
            return f"{existing}: {refused.strerror}"
    return ""


def _untracked(args: Namespace) -> Iterator[str]:
    for flag, folder in (("--load", args.load), ("--pretrained-checkpoint", args.pretrained_checkpoint)):
        if not folder or "://" in folder:
            continue
        tracker = Path(folder) / TRACKER
        try:
            named = tracker.read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:  # else Megatron starts from the beginning
            beside = non_persistent_folder(args, folder)
            elsewhere = args.pretrained_checkpoint is not None or (beside and (Path(beside) / TRACKER).is_file())
            if args.elastic and args.exit_on_missing_checkpoint and not elsewhere:
                yield f"{flag} {folder}: no checkpoint is there, and --exit-on-missing-checkpoint asks for one"
            continue
        except OSError as error:
            yield f"{flag} {folder}: {tracker} cannot be read ({error.strerror}): change its permissions"
            continue
        if named != "release" and not named.isdecimal():
            yield (
                f"{flag} {folder}: {tracker.name} holds {named[:40]!r}, not the number of a checkpoint: write one "
                f"into it (there are: {_present(Path(folder))}), or give another folder"
            )
        elif named != "release":
            yield from _absent(args, flag, Path(folder), int(named))


def _absent(args: Namespace, flag: str, folder: Path, named: int) -> Iterator[str]:
    """Yield the checkpoint that would be loaded if it is not there. Elastic jobs may take an older one instead."""
    step = args.ckpt_step or named
    older = [number for number in _numbers(folder) if number <= named]
    if (folder / f"iter_{step:07d}").is_dir() or (args.elastic and not args.ckpt_step and older):
        return
    said = f"--ckpt-step {step}" if args.ckpt_step else f"{TRACKER} names step {step}"
    yield f"{flag} {folder}: {said}, which is not there (there are: {_present(folder)}): choose another step or folder"


def _present(folder: Path) -> str:
    """Return the numbers of the checkpoints in ``folder``, newest first, as a text."""
    return ", ".join(str(number) for number in sorted(_numbers(folder), reverse=True)) or "none"


def _numbers(folder: Path) -> list[int]:
    names = [path.name.removeprefix("iter_") for path in folder.glob("iter_*") if path.is_dir()]
    return [int(name) for name in names if name.isdecimal()]
