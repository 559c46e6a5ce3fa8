"""The writers of the job's TensorBoard and Weights & Biases logs, on the rank that reports now.

Megatron opens its writers once, on its last rank. When that rank is lost, the highest
living rank opens its own, and closes them when the last rank is back. For TensorBoard it is a
further event file in the same folder, for W&B the same run resumed (``wandb.init`` with
``WANDB_RUN_ID`` and ``WANDB_RESUME=allow``, which wandb reads from the environment). A rank
that is started again opens no run before it is admitted. Beside Megatron's own values the
rank logs the figures of the run that its agent tells: losses, recoveries, lost time, goodput,
protection. TensorBoard gets no points of them that a straight line has anyway. TensorBoard's lines are flushed
after each step and each evaluation, so the lines of a lost rank are in its file; wandb's own process sends its
queued lines.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from megatron.training import get_args, global_vars

from megatron.elastic.control import env
from megatron.elastic.control.membership import RunFigures
from megatron.elastic.control.observations import CAUSES
from megatron.elastic.mcore.patching.patches import Row
from megatron.elastic.observe.curves import Curves

__all__ = ["Reporter"]


class Reporter:
    """This process's writers."""

    def __init__(self) -> None:
        self._waits = os.environ.get(env.NEWCOMER) == "1"
        """True if another rank reports, because this rank is not admitted yet."""
        self._curves = Curves()
        """Points of the figures of the run in this rank's event file."""

    def rows(self) -> tuple[Row, ...]:
        """(symbol, reason, replacement) for the patch table."""
        return (
            (
                "megatron.training.global_vars._set_wandb_writer",
                "one W&B run for the whole job, whichever rank reports",
                self._of_one_run,
            ),
        )

    def hand_over(self, reports: bool) -> None:
        """Open this rank's writers if it ``reports`` from now on; close them if another rank does."""
        args, self._waits = get_args(), False
        board, run = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
        if reports:
            with _as_last_rank(args):
                if board is None:
                    global_vars._set_tensorboard_writer(args)
                if run is None:
                    _resume_run(args)
            return
        if board is not None:
            board.close()
            global_vars._GLOBAL_TENSORBOARD_WRITER = None
            self._curves = Curves()
        if run is not None:
            run.finish()
            global_vars._GLOBAL_WANDB_WRITER = None

    def log(self, figures: RunFigures | None, step: int) -> None:
        """Log the figures of the run with ``step``, where this rank has writers and Megatron logs the step."""
        board, run = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
        if figures is None or board is None or step % get_args().tensorboard_log_interval:
            return
        values = _named(figures)
        for point in self._curves.points(values, step):
            board.add_scalar(*point)
        if run is not None:
            run.log(values, step)

    def flush(self) -> None:
        """Write all logged lines to TensorBoard's file."""
        writer = global_vars.get_tensorboard_writer()
        if writer is not None:
            writer.flush()

    def _of_one_run(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> None:
            if self._waits:
                return
            os.environ.setdefault("WANDB_RUN_ID", _run_id())
            os.environ.setdefault("WANDB_RESUME", "allow")
            original(*args, **kwargs)

        return replacement


def _named(figures: RunFigures) -> dict[str, float]:
    """Return the values to log by name. A cause of lost time has none before it has cost any."""
    alone = asdict(figures)
    causes = zip(CAUSES, alone.pop("lost_by_cause_s"), strict=True)
    values = alone | {f"lost_{cause.replace(' ', '_')}_s": seconds for cause, seconds in causes if seconds}
    return {f"elastic/{name}": float(value) for name, value in values.items() if math.isfinite(value)}


@contextmanager
def _as_last_rank(args: Any) -> Iterator[None]:
    """Set ``args.rank`` to the last rank inside: only there Megatron opens writers."""
    rank, args.rank = args.rank, args.world_size - 1
    try:
        yield
    finally:
        args.rank = rank


def _resume_run(args: Any) -> None:
    """Open the W&B run; a failure is logged and does not stop training."""
    try:
        global_vars._set_wandb_writer(args)
    except Exception as error:  # wandb's own errors have no common base in all its versions
        why = " ".join(str(error).split()) or type(error).__name__
        print(
            f"--wandb-project: rank {os.environ['RANK']} is the reporter now and "
            f"cannot log to W&B ({why}); training goes on",
            flush=True,
        )


def _run_id() -> str:
    """Return the id of the W&B run: equal in all processes of one job, different in the next job of that name."""
    words = f"{os.environ[env.RUN_ID]}|{os.environ[env.SECRET]}"
    return hashlib.sha256(words.encode()).hexdigest()[:16]
