"""The removal of a checkpoint that --save-retain-interval does not keep, once the next one has its name.

Megatron removes it as it writes the tracker. Under --elastic the next checkpoint has only a partial name then, and may
still fail. So a job that ended in between, or whose disk was full, had neither.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.training.checkpointing import get_checkpoint_name

from megatron.elastic.mcore.args.folders import non_persistent_folder

__all__ = ["discard", "nothing_removed", "save_folders"]

_REMOVED = ".removed"
"""End of the name of a checkpoint that is being removed."""


@contextmanager
def nothing_removed(args: Any) -> Iterator[None]:
    """Have Megatron finish a save inside the context without removing an older checkpoint."""
    interval = getattr(args, "save_retain_interval", None)
    args.save_retain_interval = None
    try:
        yield
    finally:
        args.save_retain_interval = interval


def save_folders(args: Any) -> tuple[str, ...]:
    """Return the folders that checkpoints are saved to: that of ``--save``, and of non-persistent ones if any."""
    beside = non_persistent_folder(args, args.save)
    return (args.save,) if beside is None else (args.save, beside)


def discard(args: Any, folder: str, before: int, saved: int) -> None:
    """Remove the checkpoint of step ``before`` in ``folder`` unless it is to be kept; ``saved``: step of the next one.

    Only in the folder of ``--save``: Megatron itself keeps one of non-persistent checkpoints. It loses its name at
    once, so that half of it is no checkpoint; a thread removes the files, and those that a killed job has left behind.
    Prints Megatron's lines.
    """
    interval = args.save_retain_interval
    if folder != args.save.rstrip("/") or interval is None or before <= 0 or before == saved or before % interval == 0:
        return
    name = get_checkpoint_name(args.save, before, return_base_dir=True)
    of_step = f"checkpoint from iteration {before:7d} at {args.save}"
    if os.path.islink(name):
        print(f"  skipping deleting {of_step} since it is a symbolic link", flush=True)
        return
    try:
        os.rename(name, name + _REMOVED)
    except OSError as error:  # the job goes on, as Megatron's does
        print(f'  encountered exception "{error}" when trying to delete {of_step}', flush=True)
        return
    threading.Thread(target=_remove, args=(args.save, of_step), name="elastic-remove").start()


def _remove(save: str, of_step: str) -> None:
    for folder in Path(save).glob("*" + _REMOVED):
        shutil.rmtree(folder, ignore_errors=True)  # a later thread may remove the same
    print(f"  successfully deleted {of_step}", flush=True)
