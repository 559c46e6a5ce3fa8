"""One file of a checkpoint, written and hashed in one go.

``FileSystemWriterAsync.write_preloaded_data`` of Megatron opens the file itself, so what
it writes could only be hashed by reading it back. The same items go through the same
function of torch here, into a file that hashes what it is given.
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
    """Write one of Megatron's write buckets; returns where each item is, and the hash of the file.

    On disk when this returns. Raises ``OSError``, or what torch makes of one.
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
