"""Who writes the job's TensorBoard log: the rank that reports, whoever that is now.

Megatron opens a writer on its last rank, once. When that rank is lost the highest
living one opens its own in the same folder (a further event file of the same run),
and gives it up when the last rank is back. Every line is flushed: what a lost rank had
logged is there.
"""

from __future__ import annotations

from typing import Any

from megatron.training import get_args, global_vars

__all__ = ["flush", "hand_over"]


def hand_over(reports: bool) -> None:
    """Open this rank's writer when it has come to report, close it when another does."""
    args: Any = get_args()
    writer = global_vars.get_tensorboard_writer()
    if reports and writer is None:
        rank, args.rank = args.rank, args.world_size - 1
        try:
            global_vars._set_tensorboard_writer(args)
        finally:
            args.rank = rank
    elif writer is not None and not reports:
        writer.close()
        global_vars._GLOBAL_TENSORBOARD_WRITER = None


def flush() -> None:
    """What is logged so far is in the file."""
    writer = global_vars.get_tensorboard_writer()
    if writer is not None:
        writer.flush()
