"""The comparison of a checkpoint with its manifest before it is loaded; a damaged one is skipped for an older one.

Megatron also loads a non-persistent checkpoint where that is as new as the one that the tracker or --ckpt-step names.

Every rank reads its share of the files, so all files are read once for any number of
ranks. Ranks exchange their findings and so make the same choice. A checkpoint of plain
Megatron has no manifest; it is loaded, and one line says that it could not be verified.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.training.checkpointing import checkpoint_exists, get_checkpoint_tracker_filename

from megatron.elastic.comm.exchange import gather_messages
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.args.folders import non_persistent_folder
from megatron.elastic.state.manifest import Manifest, ManifestError, damage, read, shares

__all__ = ["legible", "step_tracked", "verified"]

_UNVERIFIED = "-"
"""In place of a manifest's hash: no manifest."""
_CHOOSE = "load", "pretrained_checkpoint", "ckpt_step", "non_persistent_ckpt_type"
"""Arguments by which Megatron chooses a checkpoint."""
_COMMON = "common.pt", "metadata.json"
"""Files of a checkpoint with arguments and other values that are the same on all ranks."""
_FINDINGS = 16
"""Largest number of findings that one rank sends to the others."""


@dataclass(frozen=True)
class _Found:
    """The checkpoints that the first rank found in the folder."""

    argument: str = ""
    """The argument that names it."""
    flag: str = ""
    """The same as a flag, with its value."""
    checkpoints: tuple[tuple[str, str], ...] = ()
    """(folder, name) of each: the one that Megatron would load first, then those of earlier steps, newest first."""
    why: str = ""
    """Why none can be loaded; also empty if no checkpoint is to be loaded."""


@contextmanager
def verified(args: Any, fabric: Fabric, say: Callable[[str], None]) -> Iterator[Manifest | None]:
    """Have Megatron load the newest checkpoint that verifies, beginning with its own choice, inside the context.

    With --ckpt-step it is that choice or none. Yields its manifest, ``None`` if it has none. Collective. ``say`` prints
    a line, on one rank. Raises :class:`BadInput` if checkpoints exist and none verifies.
    """
    first, before = fabric.alive[0], {name: getattr(args, name) for name in _CHOOSE}
    speaks = fabric.rank == first
    texts = gather_messages(fabric, str, json.dumps(astuple(_look(args)) if speaks else None))
    found = _Found(*json.loads(texts[first]))
    manifest: Manifest | None = None
    if found.checkpoints or found.why:
        instead, manifest = _choose(found, args.ckpt_step, fabric, say if speaks else _nothing)
        if instead is not None:
            vars(args).update(_naming(found.argument, *instead))
    try:
        yield manifest
    finally:
        vars(args).update(before)


@contextmanager
def legible(args: Any, argument: str) -> Iterator[None]:
    """Have Megatron take ``args`` from the newest checkpoint in the folder of ``argument`` whose own it can read.

    Inside the context, beginning with its own choice. Each rank looks for itself; all find the same.
    """
    before, folder = {name: getattr(args, name) for name in _CHOOSE}, getattr(args, argument)
    places = () if folder is None else _look_in(args, argument, folder).checkpoints
    instead = next((place for place in places if not _common_damage(Path(*place))), None)
    if instead is not None and instead != places[0]:
        vars(args).update(_naming(argument, *instead))
    try:
        yield
    finally:
        vars(args).update(before)


def _naming(argument: str, folder: str, name: str) -> dict[str, Any]:
    """Return the arguments with which Megatron loads one checkpoint by ``argument``, which names its folder."""
    return {argument: folder, "ckpt_step": _step(name), "non_persistent_ckpt_type": None}


def _common_damage(checkpoint: Path) -> str:
    """Return a finding about the files of a checkpoint that Megatron takes arguments from; empty: none."""
    try:
        manifest = read(checkpoint)
    except ManifestError as error:
        return str(error)
    if manifest is None:
        return "" if checkpoint.is_dir() else _what_is_there(checkpoint)
    found = damage(checkpoint, {name: manifest.files[name] for name in _COMMON if name in manifest.files})
    return found[0] if found else ""


def _nothing(line: str) -> None:
    return None


def _choose(
    found: _Found, step: int | None, fabric: Fabric, say: Callable[[str], None]
) -> tuple[tuple[str, str] | None, Manifest | None]:
    """Return the (folder, name) to load instead of Megatron's choice (None to keep that), and its manifest."""
    why = found.why
    for number, (folder, name) in enumerate(found.checkpoints):
        began = time.monotonic()
        finding, manifest = _examine(Path(folder) / name, fabric)
        shown = name if found.flag.endswith(f" {folder}") else f"{folder}/{name}"
        if not finding:
            seconds = time.monotonic() - began
            without = "is loaded unverified: it has no manifest (plain Megatron or an older version wrote it)"
            say(f"{found.flag}: {shown} {without if manifest is None else f'is verified ({seconds:.2f} s)'}")
            return (folder, name) if number else None, manifest
        if not step:
            say(f"{found.flag}: {shown} is skipped: {finding}")
        why = why or f"{shown}: {finding}"
    advice = "choose another step (--ckpt-step) or another folder"
    raise BadInput(f"{found.flag}: no checkpoint there can be loaded ({why}): {advice}")


def _look(args: Any) -> _Found:
    """Find the checkpoints in the order in which Megatron looks for them."""
    argument = "load"
    if args.pretrained_checkpoint is not None and not checkpoint_exists(args.load):
        argument = "pretrained_checkpoint"
    folder = getattr(args, argument)
    return _Found() if folder is None else _look_in(args, argument, folder)


def _look_in(args: Any, argument: str, folder: str) -> _Found:
    """Find the checkpoints in ``folder``, which ``argument`` names."""
    found, step = _Found(argument, f"--{argument.replace('_', '-')} {folder}"), args.ckpt_step
    beside = non_persistent_folder(args, folder)
    try:
        named = _tracked(folder)
        release = named == "release" and not step
        persistent = [(folder, named)] if release else _up_to(folder, step or step_tracked(folder))
        other = [] if beside is None else _up_to(beside, step_tracked(beside))
    except ValueError as error:
        return replace(found, why=str(error))
    except OSError as error:
        return replace(found, why=f"{error.filename} cannot be read: {error.strerror}")
    newest = [places[0] for places in (other, persistent) if places]
    if not newest:
        return found
    first = max(newest, key=lambda place: _step(place[1]))
    if step or release:
        return replace(found, checkpoints=(first,))
    rest = sorted((place for place in (*other, *persistent) if place != first), key=lambda p: _step(p[1]), reverse=True)
    return replace(found, checkpoints=(first, *rest))


def _tracked(folder: str) -> str:
    """Return what the tracker in ``folder`` holds; empty if there is none. Raises ``ValueError`` if it is no step."""
    tracker = Path(get_checkpoint_tracker_filename(folder))
    try:
        named = tracker.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
    if named != "release" and not named.isdecimal():
        raise ValueError(f"{tracker.name} holds {named[:40]!r}, not the number of a step")
    return named


def step_tracked(folder: str) -> int | None:
    """Return the step that the tracker in ``folder`` names, of a release 0; None if there is no tracker.

    Raises ``OSError``, or ``ValueError`` if it names none.
    """
    named = _tracked(folder)
    return _step(named) if named else None


def _up_to(folder: str, step: int | None) -> list[tuple[str, str]]:
    """Return the checkpoint of ``step`` in ``folder``, there or not, and those of earlier steps, newest first."""
    if step is None:
        return []
    names = {path.name for path in Path(folder).iterdir() if re.fullmatch(r"iter_\d{7,}", path.name)}
    older = sorted((name for name in names if 0 < _step(name) < step), key=_step, reverse=True)
    return [(folder, f"iter_{step:07d}"), *((folder, name) for name in older)]


def _step(name: str) -> int:
    """Return the step of a checkpoint, or of a tracker's text; of a release 0, as Megatron counts it."""
    return 0 if name == "release" else int(name.removeprefix("iter_"))


def _examine(checkpoint: Path, fabric: Fabric) -> tuple[str, Manifest | None]:
    """Return the finding about a checkpoint (empty: none), and its manifest if there is one; equal on every rank."""
    mark, findings, manifest = _UNVERIFIED, list[str](), None
    try:
        manifest = read(checkpoint)
        if manifest is not None:
            mine = shares(manifest.files, len(fabric.alive))[fabric.alive.index(fabric.rank)]
            mark, findings = manifest.digest, damage(checkpoint, mine)[:_FINDINGS]
        elif not (checkpoint / "metadata.json").is_file():
            findings = [_what_is_there(checkpoint)]
    except ManifestError as error:
        findings = [f"its manifest cannot be relied on: {error}"]
    by_rank = gather_messages(fabric, str, json.dumps([mark, findings]))
    reports = [json.loads(text) for text in by_rank.values()]
    found = [finding for _, findings in reports for finding in findings]
    marks = {mark for mark, _ in reports}
    if not found and len(marks) > 1:
        found = ["ranks do not see the same files"]
    found = sorted(set(found))
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (found[0] + more if found else ""), manifest


def _what_is_there(checkpoint: Path) -> str:
    if not checkpoint.is_dir():
        return "it is not there"
    if any(checkpoint.glob("mp_rank_*")):
        converted = "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
        return f"it is of --ckpt-format torch: convert it with plain Megatron, {converted}"
    return "it is no checkpoint: there is no metadata.json"
