"""A written checkpoint is whole: its index says for every part of every tensor in which file it is.

Megatron's index has two halves: the parts that the plan names, and the places that writers report. Should they ever
differ, a load would find out only when it needs the part. So it is looked at before a checkpoint gets its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

__all__ = ["require_whole"]


def require_whole(folder: Path) -> None:
    """Raise ``OSError`` if the index of ``folder`` lacks the place of some part, or names one beyond a file's end."""
    index = FileSystemReader(folder).read_metadata()
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    for part in _parts(index):
        place = index.storage_data.get(part)
        if place is None or place.offset + place.length > sizes.get(place.relative_path, 0):
            where = "" if part.offset is None else f" at {tuple(part.offset)}"
            raise OSError(f"{folder} has no {part.fqn}{where}")


def _parts(index: Metadata) -> Iterator[MetadataIndex]:
    for name, entry in index.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            yield from (MetadataIndex(name, chunk.offsets) for chunk in entry.chunks)
        else:
            yield MetadataIndex(name)
