"""Errors of computations that may have read what an interrupted collective did not write.

A fabric that enqueues on a device returns before an operation is done. Where an interruption ends it, what it was to
write is undefined, and the host may read it before it comes to a call that tells of the interruption.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.elastic.comm.errors import CommError, GenerationChanged
from megatron.elastic.comm.fabric import Fabric

__all__ = ["as_interruption"]


@contextmanager
def as_interruption(fabric: Fabric) -> Iterator[None]:
    """Turn an error of the block into ``GenerationChanged`` if operations of ``fabric`` have been cut off.

    An error that has another cause is raised again when the block is repeated in the next generation.
    """
    try:
        yield
    except CommError:
        raise
    except Exception as error:
        newer = fabric.cut_off_by()
        if newer:
            raise GenerationChanged(newer) from error
        raise
