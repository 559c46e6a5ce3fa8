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
from pathlib import Path

from megatron.elastic.control import env
from megatron.elastic.mcore.args.bad_input import BadInput

__all__ = ["check_folders", "why_not_writable"]

_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
"""Errors of file systems without O_TMPFILE (open(2))."""
_TRACKER = "latest_checkpointed_iteration.txt"


def check_folders(args: Namespace, environ: Mapping[str, str] = os.environ) -> None:
    """Raise one :class:`BadInput` for all folders of ``args`` that cannot be read or written as required."""
    if environ.get(env.NEWCOMER) == "1" or environ.get(env.INCARNATION, "0") != "0":
        return
    faults = (*_unwritable(args), *_untracked(args))
    if faults:
        raise BadInput(*faults)


def _unwritable(args: Namespace) -> Iterator[str]:
    event_log = getattr(args, "elastic_event_log", None) if args.elastic else None
    for flag, folder in (
        ("--save", args.save),
        ("--tensorboard-dir", args.tensorboard_dir),
        ("--elastic-event-log", event_log),
    ):
        why = why_not_writable(Path(folder)) if folder and "://" not in folder else ""
        if why:
            yield f"{flag} {folder} cannot be written to ({why}): give another folder, or change its permissions"


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
        tracker = Path(folder) / _TRACKER
        try:
            named = tracker.read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            continue  # Megatron starts from the beginning, or refuses (--exit-on-missing-checkpoint)
        except OSError as error:
            yield f"{flag} {folder}: {tracker} cannot be read ({error.strerror}): change its permissions"
            continue
        if named != "release" and not named.isdecimal():
            yield (
                f"{flag} {folder}: {tracker.name} holds {named[:40]!r}, not the number of a checkpoint: write one "
                f"into it (there are: {_present(Path(folder))}), or give another folder"
            )


def _present(folder: Path) -> str:
    """Return the numbers of the checkpoints in ``folder``, newest first."""
    names = [path.name.removeprefix("iter_") for path in folder.glob("iter_*") if path.is_dir()]
    return ", ".join(str(number) for number in sorted((int(n) for n in names if n.isdecimal()), reverse=True)) or "none"
