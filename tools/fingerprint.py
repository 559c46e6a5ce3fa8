"""Names the end state of a run by hashes, so that two runs can be compared to the bit.

    python tools/fingerprint.py CHECKPOINT_OR_EVENTS           one line a tensor (or step), then the total
    python tools/fingerprint.py A --compare B                  exit code 1 and the first differences, if any

A checkpoint is Megatron's ``torch_dist`` format: a directory that holds
``.metadata``, or one above it that holds ``latest_checkpointed_iteration.txt``.
Whole tensors are hashed (dtype, shape, bytes), so neither how the tensors were sharded
nor how many ranks wrote them matters. Where the checkpoint has a manifest, its files are
compared with it first, and a file that is not as it was written is an error; ``verified``
in the last line is the number of files, or null without a manifest. ``--objects`` adds entries other than tensors
(RNG states, arguments, scheduler), which may differ between runs that computed the same.

An event log (``--elastic-event-log``) is a directory with ``rank*.jsonl``: each
committed step is hashed by loss, gradient norm, samples and their ledger; times,
attempts and the rank that logged it are left out.

Checkpoints are unpickled: only read those you trust.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.elastic.observe.event_kinds import StepEvent
from megatron.elastic.observe.events import read_events
from megatron.elastic.state.manifest import MANIFEST, Manifest, ManifestError, damage, read

__all__ = [
    "FingerprintError",
    "checkpoint_fingerprint",
    "differences",
    "events_fingerprint",
    "fingerprint",
    "tensor_hash",
    "total",
]

BATCH_BYTES = 1 << 30  # tensors are read this much at a time


class FingerprintError(ValueError):
    """The path holds neither a checkpoint nor an event log, or one that contradicts itself."""


def _digest(*parts: bytes) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def tensor_hash(tensor: torch.Tensor) -> str:
    """Of dtype, shape and bits: 0.0 and -0.0 differ, as do NaNs with other payloads."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return _digest(str(tensor.dtype).encode(), str(tuple(tensor.shape)).encode(), raw)


def _object_parts(value: Any) -> Iterator[bytes]:
    """A value as bytes that depend on its content only, not on addresses or order of insertion."""
    if isinstance(value, torch.Tensor):
        yield tensor_hash(value).encode()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode() + value.tobytes()
    elif isinstance(value, io.BytesIO):
        yield value.getvalue()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from _object_parts(value[key])
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}]".encode()
        for item in value:
            yield from _object_parts(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _object_parts({item.name: getattr(value, item.name) for item in fields(value)})
    elif isinstance(value, Enum) or not hasattr(value, "__dict__"):
        yield repr(value).encode()
    elif isinstance(value, argparse.Namespace):
        yield from _object_parts(vars(value))
    else:
        yield re.sub(r" at 0x[0-9a-f]+", "", repr(value)).encode()


def _iteration_directory(path: Path) -> Path:
    """``path`` itself, or its newest iteration."""
    tracker = path / "latest_checkpointed_iteration.txt"
    if (path / ".metadata").is_file() or not tracker.is_file():
        return path
    text = tracker.read_text().strip()
    return path / ("release" if text == "release" else f"iter_{int(text):07d}")


def _batches(sizes: Mapping[str, TensorStorageMetadata]) -> Iterator[dict[str, torch.Tensor]]:
    """Empty tensors to load into, in order of name, at most ``BATCH_BYTES`` (or one tensor) at a time."""
    batch: dict[str, torch.Tensor] = {}
    held = 0
    for name in sorted(sizes):
        empty = torch.empty(sizes[name].size, dtype=sizes[name].properties.dtype)
        if batch and held + empty.nbytes > BATCH_BYTES:
            yield batch
            batch, held = {}, 0
        batch[name] = empty
        held += empty.nbytes
    if batch:
        yield batch


def _load(state: dict[str, Any], directory: Path) -> None:
    """Fill ``state`` in this process alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # alone is what is meant
        dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)


def _manifest(directory: Path) -> Manifest | None:
    try:
        return read(directory)
    except ManifestError as error:
        raise FingerprintError(f"{directory / MANIFEST} cannot be relied on: {error}") from None


def _compare_with_manifest(directory: Path) -> None:
    """Raises :class:`FingerprintError` for files that are not as the manifest says; without one it says nothing."""
    manifest = _manifest(directory)
    found = [] if manifest is None else damage(directory, manifest.files)
    if found:
        raise FingerprintError(f"{directory}: {'; '.join(found)}")


def checkpoint_fingerprint(path: Path, objects: bool = False) -> dict[str, str]:
    """Hash of every tensor of a ``torch_dist`` checkpoint by name (and, with ``objects``, of the rest)."""
    directory = _iteration_directory(path)
    _compare_with_manifest(directory)
    if not (directory / ".metadata").is_file():
        raise FingerprintError(f"{directory} has no .metadata: not a complete torch_dist checkpoint")
    entries = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    hashes: dict[str, str] = {}
    for batch in _batches(tensors):
        _load(batch, directory)
        hashes.update((name, tensor_hash(tensor)) for name, tensor in batch.items())
    if objects:
        rest: dict[str, Any] = {name: None for name in entries if name not in tensors}
        if rest:
            _load(rest, directory)
        if (directory / "common.pt").is_file():
            rest["common.pt"] = torch.load(directory / "common.pt", map_location="cpu", weights_only=False)
        hashes.update((f"object {name}", _digest(*_object_parts(value))) for name, value in rest.items())
    return hashes


def events_fingerprint(path: Path) -> dict[str, str]:
    """Hash of every committed step of an event log, named ``step 0000001`` and so on.

    Raises :class:`FingerprintError` when two ranks report a step differently.
    """
    facts: dict[int, dict[str, Any]] = {}
    for record in read_events(path):
        event = record.event
        if not isinstance(event, StepEvent):
            continue
        known = facts.setdefault(event.step, {})
        said: dict[str, Any] = {"samples": event.samples, "skipped": event.skipped, "ledger": event.ledger or None}
        said |= {"grad_norm": event.grad_norm, **{f"loss {name}": value for name, value in event.losses.items()}}
        for name, value in said.items():
            if value is not None and repr(known.setdefault(name, value)) != repr(value):
                raise FingerprintError(
                    f"step {event.step}: rank {record.rank} reports {name} {value!r}, another rank {known[name]!r}"
                )
    return {f"step {step:07d}": _digest(*_object_parts(facts[step])) for step in sorted(facts)}


def fingerprint(path: Path, objects: bool = False) -> dict[str, str]:
    """Hashes by name of whichever ``path`` is: a checkpoint or an event log."""
    if not path.is_dir():
        raise FingerprintError(f"no directory {path}")
    if any(path.glob("rank*.jsonl")):
        return events_fingerprint(path)
    return checkpoint_fingerprint(path, objects)


def total(hashes: Mapping[str, str]) -> str:
    """One hash of all, names included."""
    return _digest(*(f"{name}={hashes[name]}".encode() for name in sorted(hashes)))


def differences(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """One line for each name that is missing on a side or differs."""
    lines = []
    for name in sorted(first.keys() | second.keys()):
        if name not in second:
            lines.append(f"only in the first: {name}")
        elif name not in first:
            lines.append(f"only in the second: {name}")
        elif first[name] != second[name]:
            lines.append(f"differs: {name}")
    return lines


def _report(path: Path, hashes: Mapping[str, str]) -> None:
    for name, value in hashes.items():
        print(f"{value}  {name}")
    manifest = _manifest(_iteration_directory(path))
    verified = None if manifest is None else len(manifest.files)
    print(json.dumps({"path": str(path), "entries": len(hashes), "verified": verified, "total": total(hashes)}))


def _compare(first: Mapping[str, str], second: Mapping[str, str], show: int) -> int:
    lines = differences(first, second)
    for line in lines[:show]:
        print(line)
    if len(lines) > show:
        print(f"... and {len(lines) - show} more")
    print(json.dumps({"equal": not lines, "differences": len(lines), "entries": [len(first), len(second)]}))
    return 1 if lines else 0


def main(arguments: list[str] | None = None) -> int:
    """0: done or equal, 1: different, 2: unreadable."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="checkpoint or event log directory")
    parser.add_argument("--compare", type=Path, help="a second one, to compare with the first")
    parser.add_argument("--objects", action="store_true", help="hash entries that are not tensors, too")
    parser.add_argument("--show", type=int, default=20, help="differences to print")
    options = parser.parse_args(arguments)
    try:
        first = fingerprint(options.path, options.objects)
        if options.compare is None:
            _report(options.path, first)
            return 0
        return _compare(first, fingerprint(options.compare, options.objects), options.show)
    except (FingerprintError, FileNotFoundError, ValueError) as error:
        print(f"fingerprint: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
