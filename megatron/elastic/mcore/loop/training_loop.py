"""Megatron-LM's training loop as the host of the engine.

The engine runs the step and the fenced actions beside it. The highest living rank prints the
lines of Megatron's last rank. The loop itself, its arguments and its log lines stay
Megatron's; :mod:`setup` builds the model and the engine before it.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
from megatron.training import get_args, training
from torch.profiler import ProfilerAction

from megatron.elastic.config import ElasticConfig
from megatron.elastic.control.exits import ExitCode
from megatron.elastic.control.requests import Request
from megatron.elastic.engine.compute.model_interface import ForwardStep
from megatron.elastic.engine.compute.samples import SampleSource, StepAddress
from megatron.elastic.engine.compute.vote import mean_of
from megatron.elastic.engine.engine import Engine
from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.loop import launch_sizes
from megatron.elastic.mcore.loop.counters import Counters
from megatron.elastic.mcore.loop.evaluation import EvaluatedSet, batch_size, each_of, told_of
from megatron.elastic.mcore.loop.log_interval import LogInterval, numbers
from megatron.elastic.mcore.loop.setup import Setup
from megatron.elastic.mcore.loop.shutdown import Shutdown
from megatron.elastic.mcore.model import delayed_scales, vocabulary_range
from megatron.elastic.mcore.patching.patches import Patch, Row, bound, return_names

__all__ = ["TrainingLoop", "patches"]

_DRAIN, _TIME = "drain", "time"
_WHY = {_DRAIN: "the job was asked to end", _TIME: "--exit-duration-in-mins is over"}
"""Reason for which all ranks leave a long evaluation → words for it."""


def patches(args: Any, config: ElasticConfig) -> tuple[Patch, ...]:
    """Return the elastic rows of the patch table for this process."""
    return (*TrainingLoop(config).patches(), *(Patch(*row) for row in delayed_scales.rows(args)))


class TrainingLoop:
    """Connects Megatron's loop with the engine, on one process."""

    def __init__(self, config: ElasticConfig) -> None:
        self._counters = Counters()
        self._interval = LogInterval()
        self._setup = Setup(config, self._for_newcomer)
        self._checkpoints = self._setup.checkpoints
        self._shutdown = Shutdown(self._setup, config.respawn)
        self._came_later = False
        self._evaluated: list[tuple[Any, None, bool]] = []
        """Results of sets that Megatron's function asks for next, in its order."""
        self._begun = False
        self._in_loop = False
        """True while a further step follows an evaluation, or a boundary at which the job can end."""
        self._ends = {_DRAIN: lambda: self._engine.agreement.membership.pending().drain, _TIME: _time_is_up}

    @property
    def _engine(self) -> Engine:
        return self._setup.engine

    def _for_newcomer(self) -> Mapping[str, Any]:
        return {**self._counters.for_newcomer(), "interval": self._interval.for_newcomer()}

    def patches(self) -> tuple[Patch, ...]:
        """Return the elastic rows of the patch table, bound to this object."""
        before = map(self._shutdown.proven, self._setup.rows())
        ending = map(self._shutdown.named, (*self._rows(), *self._checkpoints.rows()))  # also after the loop
        own = (*launch_sizes.rows(), *vocabulary_range.rows(), *self._setup.context.rows())
        rows = (*before, *ending, *own, *self._setup.reporter.rows())
        patches = (Patch(symbol, reason, make) for symbol, reason, make in rows)
        return (*patches, *self._setup.layer_losses.patches())

    def _rows(self) -> tuple[Row, ...]:
        loop = "megatron.training.training."
        repeated = "a collective outside the step: repeated after a loss"
        return (
            (loop + "train", "a newcomer is admitted before the loop reads its counters", self._train),
            (loop + "train_step", "a step is a transaction that survives the loss of ranks", self._train_step),
            (
                loop + "dummy_train_step",
                "an iteration of --iterations-to-skip is a step that every rank agrees to leave out",
                self._leave_out,
            ),
            (loop + "evaluate", "evaluation is repeated as a phase when ranks are lost in it", self._evaluate),
            (
                loop + "evaluate_and_print_results",
                "every rank knows the validation sets: nothing about them is broadcast, where a loss would end the job",
                self._evaluate_sets,
            ),
            (loop + "training_log", repeated, self._training_log),
            ("megatron.core.timers.Timers.log", repeated, self._log_timers),
            (
                "megatron.training.utils.calc_params_l2_norm",
                "the norm of the masters, from their present owners; repeated after a loss",
                self._parameter_norm,
            ),
            (loop + "checkpoint_and_decide_exit", "a drained job saves and leaves at a boundary", self._decide_exit),
            (
                "megatron.training.utils.is_last_rank",
                "the highest living rank reports when the last one is gone",
                self._is_last_rank,
            ),
            (
                "megatron.training.ft_integration.shutdown",
                "the end of Megatron's program: a rank that ends now is not lost",
                self._end_of_training,
            ),
        )

    # -- the loop --------------------------------------------------------------------

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            call = bound(original, args, kwargs)
            _refuse_other_data(call)
            self._begin(call["forward_step_func"], _of_chunks(call["train_data_iterator"]))
            self._in_loop = True
            result = original(**call)
            self._in_loop = False
            return result

        return replacement

    def _begin(self, forward_step: ForwardStep, source: SampleSource | None) -> None:
        """Begin the loop: from now on state survives a loss; a newcomer is admitted here. Idempotent.

        ``forward_step`` and ``source`` are the loop's; a newcomer rehearses its first step with them.
        """
        if self._begun:
            return
        self._begun = True
        if self._setup.built:
            self._engine.agreement.membership.request(Request.BEGIN)
            self._counters.begin()
        else:
            told = self._setup.admitted(forward_step, source)
            self._counters.take(told)
            self._interval.take(told["interval"])
            self._came_later = True
            _profile_no_more(self._engine.view.rank)

    def _decide_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            call, settings = bound(original, args, kwargs), get_args()
            self._counters.boundary(call["num_floating_point_operations_so_far"])
            self._checkpoints.at_boundary(call)
            # Only a time limit has a collective here; saving has its own fence.
            if settings.exit_duration_in_mins:
                leaves = self._checkpoints.guarded(
                    lambda: self._engine.fenced(lambda: original(**call), together=True, reads_parameters=False)
                )
            else:
                leaves = original(**call)
            if self._engine.draining and not leaves:
                self._shutdown.leave(*self._checkpoints.drain(call["iteration"]))
            return leaves

        return replacement

    def _train_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        names = return_names(original)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            call = bound(original, args, kwargs)
            settings = get_args()
            self._counters.step()
            self._interval.step()
            address = StepAddress(settings.consumed_train_samples, get_current_running_global_batch_size())
            result = self._engine.step(call["forward_step_func"], _of_chunks(call["data_iterator"]), address)
            scheduler = call["opt_param_scheduler"]
            scheduler.num_steps = self._engine.record.scheduler_steps
            scheduler.step(increment=0)
            shown = self._setup.layer_losses.apart(result.losses)
            losses = {key: torch.tensor(value) for key, value in shown.items()}
            values = {
                "{}": losses,  # Megatron returns {} on ranks that are not the last stage; here every rank knows them
                "skipped_iter": int(result.skipped),
                "should_checkpoint": False,
                "should_exit": False,
                "exit_code": 0,
                "grad_norm": None if result.skipped else result.grad_norm,
                "num_zeros_in_grad": None if result.skipped else result.zeros,
                "log_max_attention_logit": 0,
            }
            return tuple(values[name] for name in names)

        return replacement

    def _leave_out(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(data_iterator: Any) -> None:
            self._counters.step()
            self._interval.step()
            address = StepAddress(get_args().consumed_train_samples, get_current_running_global_batch_size())
            self._engine.step(_computes_nothing, None, address, left_out=True)

        return replacement

    def _evaluate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            call = bound(original, args, kwargs)
            if self._evaluated:
                return self._evaluated.pop(0)
            result = self._results(call["forward_step_func"], _of_chunks(call["data_iterator"]))
            return (None, None, True) if result is None else result

        return replacement

    def _results(self, forward_step: ForwardStep, reading: EvaluatedSet) -> tuple[Any, None, bool] | None:
        """Evaluate a set; return what Megatron's ``evaluate`` does, ``None`` if it was left because the job ends."""
        settings = get_args()
        self._begin(forward_step, reading.source)
        size, first = batch_size(settings), reading.first()
        addresses = [StepAddress(first + number * size, size) for number in range(reading.batches)]
        sums = self._engine.evaluate(forward_step, reading.source, addresses, self._ends)
        settings.consumed_valid_samples += len(addresses) * size  # the next one reads as if this one had ended
        if isinstance(sums, str):
            self._setup.notice(f"an evaluation is left without a result: {_WHY[sums]}")
            if sums == _DRAIN and not self._in_loop:
                self._shutdown.leave(*self._checkpoints.end(int(self._engine.record.version)))
            return None
        return {key: torch.tensor(mean_of(*pair)) for key, pair in sums.items()}, None, False

    def _evaluate_sets(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            call = bound(original, args, kwargs)
            _refuse_other_data(call)
            call["data_iterator"] = sets = _of_chunks(call["data_iterator"])
            # All sets are evaluated before Megatron's function looks for this rank's writers: a loss may change these.
            found = []
            for one in each_of(sets):
                result = self._results(call["forward_step_func"], one)
                if result is None:
                    return
                found.append(result)

            def body() -> None:
                self._evaluated = list(found)
                with told_of(get_args(), sets):
                    original(**call)
                self._setup.reporter.flush()

            self._engine.fenced(body, reads_parameters=False)

        return replacement

    def _training_log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            call = bound(original, args, kwargs)
            if self._came_later and "is_first_iteration" in call:
                # Megatron logs a process's first step; a newcomer's first is the job's first or another one. All ranks
                # must know it alike: the line is a phase of its own.
                call["is_first_iteration"] = self._interval.first
            figures = self._engine.agreement.membership.figures()
            totals = call["total_loss_dict"]
            self._interval.before_log(totals)
            if call["iteration"] % get_args().log_interval and not call.get("is_first_iteration"):
                result = original(**call)
                self._interval.after_log(totals)
                self._setup.reporter.log(figures, call["iteration"])
                self._setup.reporter.flush()
                return result
            before, report_memory = copy.deepcopy(totals), call["report_memory_flag"]
            self._interval.begin_line()

            def body() -> dict[str, tuple[float, float]]:
                nonlocal report_memory
                totals.clear()
                totals.update(copy.deepcopy(before))
                self._interval.restore_times()  # a repeated line has the times of the whole interval
                report_memory = original(**call)
                return numbers(totals)

            # The norm of parameters is that of masters.
            after = self._engine.fenced(body, reads_parameters=False)
            if self._engine.behind:  # a newcomer only passes a line that has been printed
                self._interval.pass_line(totals, after)
            self._interval.after_log(totals)
            self._setup.reporter.log(figures, call["iteration"])
            self._setup.reporter.flush()
            return report_memory

        return replacement

    def _log_timers(self, original: Callable[..., None]) -> Callable[..., None]:
        """Fence the gathering of all ranks' times, which also happens at the end of a save."""

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> None:
            if self._begun:
                self._engine.fenced(lambda: original(*args, **kwargs), reads_parameters=False)
            else:
                original(*args, **kwargs)

        return replacement

    def _parameter_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> float:
            return self._engine.parameter_norm()

        return replacement

    def _is_last_rank(self, original: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(original)
        def replacement() -> bool:
            if not self._setup.built:
                return original()
            # Another rank has already reported the phases that a newcomer only passes.
            return self._engine.is_reporter and not self._engine.behind

        return replacement

    def _end_of_training(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._setup.connected:
                if self._checkpoints.unsaved:
                    remedy = f"the one before it is unchanged (--save {get_args().save}); if that is full, free space"
                    why = f"the last checkpoint could not be saved: {self._checkpoints.unsaved}; {remedy}"
                    self._shutdown.leave(ExitCode.STATE_LOST, why)
                self._shutdown.finish()
            return result

        return replacement


def _profile_no_more(rank: int) -> None:
    """Have the profiler that Megatron's loop is about to make record nothing, on the newcomer ``rank``.

    It would count steps from the newcomer's first; one that is stopped before it records could end the process later.
    """
    settings, schedule = get_args(), torch.profiler.schedule
    if not (settings.profile and settings.use_pytorch_profiler) or rank not in (settings.profile_ranks or [rank]):
        return

    def never(*_: Any, **__: Any) -> Callable[[int], ProfilerAction]:
        torch.profiler.schedule = schedule  # further ones are the script's
        return lambda _: ProfilerAction.NONE

    # Not by the flag: arguments are equal on all ranks, and checkpoints contain them.
    torch.profiler.schedule = never
    print(f"--profile: rank {rank} has joined while the job runs and is not profiled", flush=True)


def _refuse_other_data(call: Mapping[str, Any]) -> None:
    """Refuse functions of the script that Megatron calls with the model, whose layers move between ranks here."""
    given = [name for name in ("non_loss_data_func", "process_non_loss_data_func") if call.get(name) is not None]
    if given:
        raise BadInput(
            f"{' and '.join(given)} of pretrain(): --elastic evaluates losses only; leave it out, or report the values "
            "in the dictionary that the loss function returns"
        )


def _time_is_up() -> bool:
    """Return whether ``--exit-duration-in-mins`` are over on this rank."""
    minutes = get_args().exit_duration_in_mins
    return bool(minutes) and time.time() - training._TRAIN_START_TIME > 60.0 * minutes


def _computes_nothing(*_: Any) -> Any:
    raise RuntimeError("a step that is left out is computed")


def _of_chunks(found: Any) -> Any:
    """Return Megatron's value for one model chunk; with several chunks all are the same here."""
    return found[0] if isinstance(found, list) else found
