"""Megatron's saves at the boundaries of the elastic loop: begun, finished, begun again, or requested from outside.

The step's record says when a save is begun and finished, so every rank does it at the
same boundary. If a checkpoint cannot be written, the job logs a line and training goes on.
Only a missing last checkpoint changes the exit status.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from megatron.training import get_args, training

from megatron.elastic.config import ElasticConfig
from megatron.elastic.control.exits import ExitCode
from megatron.elastic.control.requests import Request
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.failures import ActionFailed
from megatron.elastic.mcore.args.bad_input import unreadable_named
from megatron.elastic.mcore.args.folders import non_persistent_folder
from megatron.elastic.mcore.checkpoint.absent_parts import AbsentParts
from megatron.elastic.mcore.checkpoint.background_save import BackgroundSave, Folders
from megatron.elastic.mcore.checkpoint.launch_stage import LaunchStage
from megatron.elastic.mcore.checkpoint.save_queue import make_own_queue
from megatron.elastic.mcore.checkpoint.state_dict import OptimizerCheckpoint
from megatron.elastic.mcore.checkpoint.verifying import legible, step_tracked
from megatron.elastic.mcore.patching.patches import Row, bound

__all__ = ["Checkpoints", "step_to_go_back_to"]

T = TypeVar("T")


def step_to_go_back_to(args: Any) -> int | None:
    """Return the step at which a restarted job would begin with the checkpoint in ``--load``; None without one."""
    if not args.load:
        return None
    beside = non_persistent_folder(args, args.load)
    try:
        named = step_tracked(args.load)
        other = None if beside is None else step_tracked(beside)
    except (OSError, ValueError):
        return None
    found = [step for step in (args.ckpt_step or named, other) if step is not None]
    if found and args.finetune and args.pretrained_checkpoint is None:
        return 0  # Megatron counts steps anew; it sets ``finetune`` itself after it took --pretrained-checkpoint
    return max(found, default=None)


class Checkpoints:
    """The checkpoints of the job. ``engine`` raises before the engine exists; ``say`` prints one line for the job."""

    def __init__(self, config: ElasticConfig, engine: Callable[[], Engine], say: Callable[[str], None]) -> None:
        self._config = config
        self._engine = engine
        self._say = say
        self._folders = Folders(
            lambda point, step: engine().tools.reach(point, step), lambda: engine().agreement.membership.fence()
        )
        self._saves: BackgroundSave | None = None
        self._boundary: Mapping[str, Any] = {}
        """Megatron's arguments at the newest boundary, for a save."""
        self._noted = False
        """True if the pending request for a checkpoint has been carried out."""
        self.unsaved = ""
        """Why the newest checkpoint could not be written; empty if it was written."""

    def rows(self) -> tuple[Row, ...]:
        """(symbol, reason, replacement) for the patch table."""
        return (
            (
                "megatron.training.training.save_checkpoint",
                "written while training goes on; begun again after a loss",
                self._save,
            ),
            (
                "megatron.training.checkpointing.generate_state_dict",
                "a rank also writes the parts of lost ranks, and the values are those of the state blocks",
                self._state_dict,
            ),
            (
                "megatron.training.checkpointing.load_args_from_checkpoint",
                "a damaged checkpoint is skipped for an older one, as where it is loaded",
                _load_arguments,
            ),
            (
                "megatron.training.checkpointing.schedule_async_save",
                "a thread writes the files for which Megatron would start a process",
                self._schedule,
            ),
            (
                "megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue",
                "one for all saves: results of a save that a loss made void would pass for the next one's",
                make_own_queue,
            ),
            (
                "megatron.training.training.maybe_finalize_async_save",
                "a checkpoint is finished at an agreed boundary",
                self._finalize,
            ),
            (
                "megatron.training.checkpointing.get_checkpoint_name",
                "a checkpoint has a partial name until it is complete",
                self._checkpoint_name,
            ),
            (
                "megatron.training.checkpointing.get_checkpoint_tracker_filename",
                "the tracker file is replaced atomically, after the checkpoint is renamed",
                self._tracker_name,
            ),
            (
                "megatron.training.wandb_utils.on_save_checkpoint_success",
                "W&B receives the final name instead of the partial one",
                self._report_to_wandb,
            ),
        )

    def attach(self, own: LaunchStage, others: AbsentParts) -> OptimizerCheckpoint:
        """Connect to the engine; return the translator of its state."""
        engine = self._engine()
        config, _ = training.get_megatron_optimizer_config(get_args())
        checkpoint = OptimizerCheckpoint(engine, own, config, others)
        self._saves = BackgroundSave(engine, checkpoint, get_args(), self._folders)
        engine.agree_on_saves(self._save_due, self._saves.written)
        return checkpoint

    # -- at a boundary -----------------------------------------------------------------

    def at_boundary(self, call: Mapping[str, Any]) -> None:
        """Carry out the agreed saves; ``call``: arguments of Megatron's ``checkpoint_and_decide_exit``."""
        self._boundary = call
        agreed = self._engine().record.agreed
        if agreed.written:
            self._complete()
        if agreed.save and not self._regular():
            self._save_as_asked()

    def drain(self, iteration: int) -> tuple[int, str]:
        """Save, unless this boundary's regular save is under way, and finish; return exit code and last line."""
        save = get_args().save
        if save and not self._regular():
            self._save_here()
        return self.end(iteration)

    def end(self, iteration: int) -> tuple[int, str]:
        """Finish the save under way, if any; return exit code and last line of a job that ends at ``iteration``."""
        save = get_args().save
        self._complete_all()
        if self.unsaved:
            return ExitCode.STATE_LOST, f"drained at iteration {iteration}, which could not be saved: {self.unsaved}"
        where = f"saved to {save}" if save else "nothing saved: there is no --save"
        return ExitCode.DRAINED, f"drained at iteration {iteration}, {where}"

    def guarded(self, action: Callable[[], T]) -> T | None:
        """Return the result of ``action``, or ``None`` with one line if it failed on some rank."""
        result: T | None = None
        with self._saving():
            result = action()
        return result

    def _regular(self) -> bool:
        """Return whether Megatron itself saves at this boundary."""
        args = get_args()
        return bool(args.save and args.save_interval) and self._boundary["iteration"] % args.save_interval == 0

    @property
    def saves(self) -> BackgroundSave:
        """The saves of this rank; raises ``RuntimeError`` before the engine exists."""
        if self._saves is None:
            raise RuntimeError("a checkpoint is saved before the elastic engine exists")
        return self._saves

    def _save_due(self) -> bool:
        """Return whether a save has to be begun at the next boundary: requested from outside, or interrupted."""
        asked = self._engine().agreement.membership.pending().checkpoint
        self._noted = self._noted and asked
        return self.saves.cut_short() or (asked and not self._noted)

    def _save_as_asked(self) -> None:
        if self._engine().agreement.membership.pending().checkpoint:
            self._noted = True
            self._engine().agreement.membership.request(Request.CHECKPOINT)
        if get_args().save:
            self._save_here()
        else:
            self._say("a checkpoint was requested, but --save is not given: no checkpoint is written")

    def _save_here(self) -> None:
        """Call Megatron's own save for the newest boundary."""
        call = self._boundary
        training.save_checkpoint_and_time(
            call["iteration"],
            call["model"],
            call["optimizer"],
            call["opt_param_scheduler"],
            call["num_floating_point_operations_so_far"],
            call["checkpointing_context"],
            train_data_iterator=call["train_data_iterator"],
        )

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> None:
            call = bound(original, args, kwargs)
            self._complete()
            with self._saving():
                self.saves.begin(original, call)
            if not self._config.background_save:
                self._complete_all()

        return replacement

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Log a line if a checkpoint cannot be written, and go on training (issue 1435 of Megatron-LM)."""
        try:
            yield
        except ActionFailed as error:
            self.unsaved = str(error)
            where = f"a checkpoint could not be written to {get_args().save}"
            self._say(f"{where}: {error}; training goes on, the previous checkpoint is unchanged (--save)")

    def _complete(self) -> str:
        """Finish the save under way, if any and if it is valid."""
        outcome = "none"
        with self._saving():
            outcome = self.saves.finish()
        self.unsaved = "" if outcome == "done" else self.unsaved
        return outcome

    def _complete_all(self) -> None:
        """Finish the save under way; begin it again as long as it is interrupted."""
        while self._complete() == "again":
            self._save_here()

    def _state_dict(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            call = bound(original, args, kwargs)
            state = original(**call)
            translator = call["optimizer"].checkpoint if call["optimizer"] is not None else None
            if translator is None or translator.content is None:  # a load
                return state
            metadata = call["model_sd_kwargs"]["metadata"]
            return translator.whole(state, call["args"], call["optimizer"].param_groups, metadata)

        return replacement

    def _schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(async_request: Any) -> None:
            self.saves.schedule(async_request)

        return replacement

    def _finalize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(blocking: bool = False, terminate: bool = False) -> None:
            if blocking and self._saves is not None:
                self._complete_all()

        return replacement

    def _checkpoint_name(self, original: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> str:
            return self._folders.named(original(*args, **kwargs))

        return replacement

    def _tracker_name(self, original: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(original)
        def replacement(checkpoints_path: str) -> str:
            return self._folders.tracked(original(checkpoints_path))

        return replacement

    def _report_to_wandb(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(checkpoint_path: str, *args: Any, **kwargs: Any) -> Any:
            return original(self._folders.final_name(checkpoint_path), *args, **kwargs)

        return replacement


def _load_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        call = bound(original, args, kwargs)
        settings, name = call["args"], call["load_arg"]
        flag, folder = f"--{name.replace('_', '-')}", getattr(settings, name)
        with unreadable_named(flag, folder), legible(settings, name):
            return original(**call)

    return replacement
