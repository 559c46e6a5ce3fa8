"""The write of one checkpoint file, hashed meanwhile.

``FileSystemWriterAsync.write_preloaded_data`` of Megatron opens the file itself, so its
contents could only be hashed by reading them back. Here the same items go through the
same function of torch into a file that hashes the bytes written to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.storage import WriteResult

from megatron.elastic.state.manifest import FileHash, HashingFile

__all__ = ["write_file"]


def write_file(transforms: Sequence[Any], bucket: Any) -> tuple[list[WriteResult], FileHash]:
    """Write one of Megatron's write buckets; return the place of each item, and the hash of the file.

    The file is on disk when this returns. Raises ``OSError``, or torch's error for one.
    """
    path, key, (texts, tensors) = bucket
    write: Callable[..., WriteResult] = filesystem._write_item
    more = {}
    if "serialization_format" in inspect.signature(write).parameters:
        more["serialization_format"] = filesystem.SerializationFormat.TORCH_SAVE
    with open(path, "wb") as file:
        stream = HashingFile(file)
        results = [write(*transforms, stream, data, item, key, **more) for item, data in (*texts, *tensors)]
        return results, stream.sync()
