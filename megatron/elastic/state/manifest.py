"""The manifest of a checkpoint: the hash of each of its files, and the record of the saved version.

It is the last file written into the folder before the folder is renamed. It carries
the ``StepRecord`` of the saved version and the digest of the newest certificate, so a
checkpoint can be traced to its certificate. A load compares every file with the manifest,
and the loaded state with the contents in it (:mod:`saved_contents`). The manifest has a
hash of itself, so damage to it is found too.

Hashes are xxh3_128, like block hashes (:mod:`hashing`): they guard against bugs, truncation
and bit flips, not against an adversary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from megatron.elastic.state.hashing import text_hash
from megatron.elastic.state.saved_contents import SavedContents

__all__ = [
    "MANIFEST",
    "FileHash",
    "HashingFile",
    "Manifest",
    "ManifestError",
    "damage",
    "files_below",
    "hash_of",
    "read",
    "shares",
]

MANIFEST = "elastic_manifest.json"
"""Name of the file, in the folder of the checkpoint."""
_FORMAT = 1
_PIECE_BYTES = 1 << 20


class ManifestError(ValueError):
    """The manifest exists but is damaged or of another format."""


@dataclass(frozen=True)
class FileHash:
    """Length in bytes and hash (32 hex digits) of a file's contents."""

    size: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """The contents of one checkpoint. Paths in ``files`` are relative to its folder, with ``/``."""

    generation: int
    incarnation: int
    """Incarnation of the rank that completed the checkpoint."""
    record: str
    """:meth:`StepRecord.to_json` of the version that was saved."""
    certificate: str
    """Digest of the newest certificate when the save began; empty if there was none."""
    files: Mapping[str, FileHash]
    contents: SavedContents | None = None
    """Contents of the saved version; ``None`` in checkpoints of older versions."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    @property
    def _raw(self) -> dict[str, object]:
        contents = {} if self.contents is None else {"contents": self.contents.raw()}
        return {
            **contents,
            "format": _FORMAT,
            "generation": self.generation,
            "incarnation": self.incarnation,
            "certificate": self.certificate,
            "record": json.loads(self.record),
            "files": {name: asdict(file) for name, file in self.files.items()},
        }

    @property
    def digest(self) -> str:
        """Hash of the whole manifest."""
        return _hash_of_raw(self._raw)

    def to_text(self) -> str:
        """Return JSON with the manifest and its hash."""
        return json.dumps({"hash": self.digest, "manifest": self._raw}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """Inverse of :meth:`to_text`. Raises :class:`ManifestError`."""
        try:
            whole = json.loads(text)
            raw = whole["manifest"]
            if _hash_of_raw(raw) != whole["hash"]:
                raise ManifestError("its contents do not match its own hash")
            if raw["format"] != _FORMAT:
                raise ManifestError(f"its format is {raw['format']}, this version reads {_FORMAT}")
            files = {str(name): FileHash(int(file["size"]), str(file["hash"])) for name, file in raw["files"].items()}
            if any(name.startswith("/") or ".." in name.split("/") for name in files):
                raise ManifestError("it names files outside the checkpoint")
            record = json.dumps(raw["record"], sort_keys=True, separators=(",", ":"))
            contents = SavedContents.from_raw(raw["contents"]) if "contents" in raw else None
            return cls(
                int(raw["generation"]), int(raw["incarnation"]), record, str(raw["certificate"]), files, contents
            )
        except ManifestError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ManifestError(f"it cannot be read ({type(error).__name__} {error})"[:200]) from None


def _hash_of_raw(raw: object) -> str:
    return text_hash(json.dumps(raw, sort_keys=True, separators=(",", ":")))


class HashingFile:
    """A file that is written sequentially and hashed meanwhile."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._state = xxhash.xxh3_128()
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write like a file."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._state.update(view)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Flush like a file."""
        self._file.flush()

    def sync(self) -> FileHash:
        """Write everything to the disk; return size and hash."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileHash(self._size, self._state.hexdigest())


def hash_of(path: Path) -> FileHash:
    """Return size and hash of a file. Raises ``OSError``."""
    state, size = xxhash.xxh3_128(), 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            state.update(piece)
            size += len(piece)
    return FileHash(size, state.hexdigest())


def files_below(folder: Path) -> list[str]:
    """Return the relative paths of all files in ``folder`` except the manifest, ascending."""
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in found if name != MANIFEST)


def read(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, None if there is none. Raises :class:`ManifestError`."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"it cannot be read ({error})") from None
    return Manifest.from_text(text)


def damage(folder: Path, files: Mapping[str, FileHash]) -> list[str]:
    """Return one sentence for each of ``files`` of a checkpoint that differs from the manifest."""
    found = []
    for name, written in sorted(files.items()):
        try:
            if (size := (folder / name).stat().st_size) != written.size:
                found.append(f"{name} has {size} bytes, {written.size} were written")
            elif hash_of(folder / name) != written:
                found.append(f"{name} is not what was written")
        except FileNotFoundError:
            found.append(f"{name} is missing")
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror or error})")
    return found


def shares(files: Mapping[str, FileHash], parts: int) -> Sequence[Mapping[str, FileHash]]:
    """Divide ``files`` into ``parts`` of about the same size: the largest first, each to the smallest part."""
    split: list[dict[str, FileHash]] = [{} for _ in range(parts)]
    sizes = [0] * parts
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        least = min(range(parts), key=lambda part: (sizes[part], part))
        split[least][name] = files[name]
        sizes[least] += files[name].size
    return split
