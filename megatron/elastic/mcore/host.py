"""Megatron-LM's training loop as the host of the engine.

Everything replaced stands in :meth:`Host.patches`: the step and its fenced
siblings go to the engine, world-wide barriers that only align clocks are left
out, and whoever is the highest living rank prints what Megatron's last rank
would. The loop itself, its arguments and its log lines stay Megatron's.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NoReturn

import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.training import get_args, training
from megatron.training.checkpointing import load_checkpoint

from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.control.failures import FELL_BACK
from megatron.elastic.control.membership import Released
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.failures import NotFinite, SilentCorruption
from megatron.elastic.engine.recovery import Outcome, StateLost
from megatron.elastic.engine.source import SampleSource, StepAddress
from megatron.elastic.engine.standing import Standing
from megatron.elastic.mcore import reporter
from megatron.elastic.mcore.bringup import Job, Links, found, join, open_links
from megatron.elastic.mcore.checkpoint import Launched
from megatron.elastic.mcore.checkpoints import BAD_INPUT, DETERMINISTIC, STATE_LOST, Checkpoints, can_fall_back
from megatron.elastic.mcore.data import source_for
from megatron.elastic.mcore.dropout import key_dropout
from megatron.elastic.mcore.model import GptPort, unwrapped
from megatron.elastic.mcore.narrate import narrate
from megatron.elastic.mcore.optimizer import EngineOptimizer, MegatronSchedule
from megatron.elastic.mcore.param_groups import GroupKeys
from megatron.elastic.mcore.patches import Patch, bound, return_names
from megatron.elastic.mcore.settings import engine_settings, nominal_topology, sample_grid
from megatron.elastic.mcore.stage import GroupStandIn, as_stage
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.state.certificate import CertificateError

__all__ = ["Host", "patches"]


def patches(args: Any, config: ElasticConfig) -> tuple[Patch, ...]:
    """The elastic rows of the patch table for this process."""
    return Host(config).patches()


_COUNTERS = (
    "curr_iteration",
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "num_floating_point_operations_so_far",
    "do_train",
    "do_valid",
    "do_test",
)
"""Arguments that Megatron's loop changes as it goes."""

@dataclass
class Reading:
    """A validation or test set and how far evaluation has read it (what Megatron's iterator remembers).

    The validation set's position is Megatron's own argument, which a newcomer is told.
    """

    source: SampleSource | None
    validation: bool
    consumed: int = 0

    def position(self) -> int:
        """Samples read so far."""
        return int(get_args().consumed_valid_samples) if self.validation else self.consumed


class Host:
    """One process's side of the bargain between Megatron's loop and the engine."""

    def __init__(self, config: ElasticConfig) -> None:
        self._config = config
        self._links: Links | None = None
        self._job: Job | None = None
        self._engine: Engine | None = None
        self._optimizer: EngineOptimizer | None = None
        self._port: GptPort | None = None
        self._launched: Launched = {}
        self._came_later = False
        self._checkpoints = Checkpoints(config, lambda: self.engine, self._notice)
        self._begun = False
        self._at_step: dict[str, Any] = {}

    @property
    def engine(self) -> Engine:
        """The engine; raises ``RuntimeError`` before the model is built."""
        if self._engine is None:
            raise RuntimeError("the elastic engine is used before the model is set up")
        return self._engine

    def patches(self) -> tuple[Patch, ...]:
        """The elastic rows of the patch table, bound to this host."""
        loop, timer = "megatron.training.training.", "megatron.core.timers.Timer."
        repeated = "a collective outside the step: repeated after a loss"
        aligns = "a barrier that only aligns clocks would wait for the dead"
        rows = (
            (
                "megatron.training.initialize._initialize_distributed",
                "links, groups and membership are the elastic runtime's; Megatron then finds a default group",
                self._initialize_distributed,
            ),
            (
                loop + "setup_model_and_optimizer",
                "the model is not wrapped in DDP: gradients, optimizer and their groups are the engine's",
                self._setup_model_and_optimizer,
            ),
            (
                loop + "build_train_valid_test_data_iterators",
                "samples are addressed by number, so that any rank can read any sample of any step",
                self._build_data_iterators,
            ),
            (loop + "train", "a newcomer is admitted before the loop reads where it stands", self._train),
            (loop + "train_step", "a step is a transaction that survives the loss of ranks", self._train_step),
            (loop + "evaluate", "evaluation is repeated as a phase when ranks are lost in it", self._evaluate),
            (loop + "training_log", repeated, self._training_log),
            (
                "megatron.training.utils.calc_params_l2_norm",
                "the norm of the masters, wherever they lie now; repeated after a loss",
                self._parameter_norm,
            ),
            (loop + "checkpoint_and_decide_exit", "a drained job saves and leaves at a boundary", self._decide_exit),
            (
                "megatron.training.checkpointing.get_rng_state",
                "random states are filed by nominal stage, also when groups have lost members",
                _nominal_rng_state,
            ),
            (loop + "print_datetime", aligns, _without_barrier),
            (timer + "start", aligns + "; a repeated phase may start twice", _starts_once),
            (timer + "stop", aligns + "; a repeated phase may stop twice", _stops_once),
            (
                "megatron.training.utils.is_last_rank",
                "the highest living rank reports when the last one is gone",
                self._is_last_rank,
            ),
            (
                "megatron.training.ft_integration.shutdown",
                "Megatron's last act: leaving now is not a loss",
                self._shutdown,
            ),
        )
        return tuple(Patch(symbol, reason, make) for symbol, reason, make in (*rows, *self._checkpoints.rows()))

    # -- before training -----------------------------------------------------------

    def _initialize_distributed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            settings = get_args()
            settings.rerun_mode = "disabled"
            self._links = open_links(self._config, 60.0 * settings.distributed_timeout_minutes)
            result = original(*args, **kwargs)
            _pin_nominal_sizes()
            return result

        return replacement

    def _setup_model_and_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            call = bound(original, args, kwargs)
            return self._build(
                call["model_provider_func"], call["model_type"], call.get("checkpointing_context")
            )

        return replacement

    def _build(self, provider: Any, model_type: Any, context: Any) -> tuple[Any, Any, Any]:
        args, links = get_args(), self._links
        assert links is not None
        get_rerun_state_machine().set_mode(RerunMode.DISABLED)
        model = training.get_model(provider, model_type, wrap_with_ddp=False)
        if len(model) != 1:
            raise RuntimeError("--elastic with --num-layers-per-virtual-pipeline-stage is not supported")
        optimizer_config, overrides = training.get_megatron_optimizer_config(args)
        groups = GroupKeys(optimizer_config, overrides)
        inner = unwrapped(model[0])
        key_dropout(inner, parallel_state.get_tensor_model_parallel_rank())
        self._port = port = GptPort(model[0], args, groups, parallel_state.get_tensor_model_parallel_rank() == 0)
        self._launched = {unit: tuple(port.unit_parameters(unit)) for unit in port.held_units()}
        self._optimizer = EngineOptimizer(groups, lambda: self.engine.record.loss_scale)
        scheduler = training.get_optimizer_param_scheduler(self._optimizer)
        nominal = nominal_topology(args, inner.config, port.tied_unit is not None)
        settings = engine_settings(args, MegatronSchedule(scheduler, groups))
        self._job = Job(port, nominal, self._config, settings, self._settled, self._counters, self._notice)
        args.iteration = args.num_floating_point_operations_so_far = 0
        if links.decision is None:  # a newcomer: the engine comes with admission, before the loop begins
            return model, self._optimizer, scheduler
        links.injector.reach("in_setup", 0)
        self._engine = found(links, self._job)
        self._attach()
        if args.load is not None or args.pretrained_checkpoint is not None:
            args.iteration, args.num_floating_point_operations_so_far = load_checkpoint(
                model, self._optimizer, scheduler, checkpointing_context=context
            )
        self._resume(scheduler)
        return model, self._optimizer, scheduler

    def _attach(self) -> None:
        """The engine is there: what saves and loads its state can be made."""
        assert self._optimizer is not None and self._port is not None
        self._optimizer.checkpoint = self._checkpoints.attach(self._port, self._launched)

    def _resume(self, scheduler: Any) -> None:
        """Start from what was loaded, or from the initial parameters."""
        args, engine = get_args(), self.engine
        assert self._optimizer is not None
        loaded, self._optimizer.loaded = self._optimizer.loaded, None
        scaler = {} if loaded is None else loaded.scaler
        record = replace(
            engine.record,
            version=args.iteration,
            adam_step=0 if loaded is None else loaded.adam_step,
            scheduler_steps=scheduler.num_steps,
            consumed_samples=args.consumed_train_samples,
            loss_scale=float(scaler.get("scale", engine.record.loss_scale)),
            growth_tracker=int(scaler.get("growth_tracker", engine.record.growth_tracker)),
            hysteresis_tracker=int(scaler.get("hysteresis_tracker", engine.record.hysteresis_tracker)),
        )
        engine.resume(record, None if loaded is None else loaded.units)
        engine.tools.reach("in_setup", 0)

    def _settled(self, outcome: Outcome, standing: Standing, seconds: float) -> None:
        assert self._links is not None
        reporter.hand_over(self.engine.is_reporter)
        # A newcomer knows nothing of the recovery that let it in.
        speaks = min(set(standing.living) - set(outcome.newcomers)) == self._links.fabric.rank
        nominal, step = self.engine.recovery.nominal, self.engine.present_step
        narrate(self._links.events, nominal, outcome, standing, step, self.engine.in_step, seconds, speaks)

    def _notice(self, why: str) -> None:
        assert self._links is not None
        if self.engine.standing.living[0] == self._links.fabric.rank:
            print(why, flush=True)

    def _build_data_iterators(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            provider = bound(original, args, kwargs)["build_train_valid_test_datasets_provider"]
            return self._sources(provider)

        return replacement

    def _sources(self, provider: Any) -> tuple[SampleSource | None, Reading, Reading]:
        args = get_args()
        if args.iteration > 0 and args.consumed_train_samples == 0:
            args.consumed_train_samples = args.iteration * args.global_batch_size
        if self._engine is not None:
            self._engine.tools.reach("in_setup", 0)
        reads = getattr(provider, "is_distributed", False) or parallel_state.get_tensor_model_parallel_rank() == 0
        # Any rank may come to compute an end of a pipeline, and only these have data sets built: all are such here.
        with as_stage(0, 1):
            datasets = training.build_train_valid_test_datasets(provider) if reads else (None, None, None)
        flags = torch.tensor(
            [int(args.train_iters > 0), int(args.eval_iters > 0), int(args.eval_iters > 0 and datasets[2] is not None)]
        )
        torch.distributed.broadcast(flags, 0)
        args.do_train, args.do_valid, args.do_test = (bool(flag) for flag in flags.tolist())
        grid = sample_grid(args)
        train, valid, test = (source_for(dataset, args, grid) for dataset in datasets)
        return train, Reading(valid, True), Reading(test, False)

    # -- the loop --------------------------------------------------------------------

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if self._engine is None:
                assert self._links is not None and self._job is not None
                self._engine, welcome = join(self._links, self._job)
                self._attach()
                self._came_later = True
                reporter.hand_over(self._engine.is_reporter)
                self._take_counters(welcome.host, bound(original, args, kwargs)["opt_param_scheduler"])
            self._begin()
            try:
                return original(*args, **kwargs)
            except (StateLost, PlanError) as error:
                self._leave(STATE_LOST, str(error))
            except (CertificateError, SilentCorruption) as error:  # the same on every rank, and again if repeated
                self._leave(DETERMINISTIC, str(error))
            except ConfigError as error:
                # Found while computing, perhaps on some ranks only: it would come back on every rank that is started.
                self._give_up(BAD_INPUT, f"error: {error}")
            except NotFinite as error:
                if not can_fall_back(get_args()):
                    raise
                self._fall_back(error)
            except Released:
                assert self._links is not None
                print(f"rank {self._links.fabric.rank} leaves as asked; the others go on", flush=True)
                self.engine.close()
                self._links.membership.finish(0)
                raise SystemExit(0) from None

        return replacement

    def _begin(self) -> None:
        """From here on the engine holds a state that outlives a loss. Idempotent."""
        if not self._begun and not self._came_later:
            self._begun = True
            self.engine.recovery.membership.request("begin")

    def _leave(self, code: int, why: str) -> NoReturn:
        """End this rank on purpose, with one line from whoever speaks."""
        assert self._links is not None
        self.engine.close()
        living = self.engine.recovery.members or self.engine.standing.living
        if living[0] == self._links.fabric.rank:
            print(why, flush=True)
        self._links.membership.finish(code)
        raise SystemExit(code)

    def _give_up(self, code: int, why: str) -> NoReturn:
        """End the whole job, with one line."""
        assert self._links is not None
        self._links.membership.give_up(code, why)
        raise SystemExit(code)

    def _fall_back(self, error: NotFinite) -> NoReturn:
        """End this process so that, with all others, it is started again from the last checkpoint."""
        assert self._links is not None
        self.engine.close()
        self._notice(f"{error}, also when computed again: the job goes back to its last checkpoint (--load)")
        sys.stdout.flush()
        os._exit(FELL_BACK)

    def _decide_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            call, settings = bound(original, args, kwargs), get_args()
            self._checkpoints.at_boundary(call)
            # Only a time limit has a collective of its own; saving is fenced by itself.
            if settings.exit_duration_in_mins:
                leaves = self._checkpoints.guarded(lambda: self.engine.fenced(lambda: original(**call), together=True))
            else:
                leaves = original(**call)
            if self.engine.draining and not leaves:
                self._leave(*self._checkpoints.drain(call["iteration"]))
            return leaves

        return replacement

    def _counters(self) -> dict[str, Any]:
        """Where Megatron's loop stood when the present step began: whoever comes begins with it, or its end."""
        return self._at_step

    def _take_counters(self, counters: Mapping[str, Any], scheduler: Any) -> None:
        args = get_args()
        for name in _COUNTERS:
            setattr(args, name, counters[name])
        args.iteration = args.curr_iteration
        scheduler.num_steps = self.engine.record.scheduler_steps
        scheduler.step(increment=0)

    def _train_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        names = return_names(original)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            call = bound(original, args, kwargs)
            settings = get_args()
            self._at_step = {name: getattr(settings, name) for name in _COUNTERS}
            address = StepAddress(settings.consumed_train_samples, settings.global_batch_size)
            result = self.engine.step(call["forward_step_func"], call["data_iterator"], address)
            scheduler = call["opt_param_scheduler"]
            scheduler.num_steps = self.engine.record.scheduler_steps
            scheduler.step(increment=0)
            losses = {key: torch.tensor(value) for key, value in result.losses.items()}
            values = {
                "{}": losses,  # what Megatron returns where there is no last stage; here every rank knows the losses
                "skipped_iter": int(result.skipped),
                "should_checkpoint": False,
                "should_exit": False,
                "exit_code": 0,
                "grad_norm": None if result.skipped else result.grad_norm,
                "num_zeros_in_grad": result.zeros,
                "log_max_attention_logit": 0,
            }
            return tuple(values[name] for name in names)

        return replacement

    def _evaluate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            call = bound(original, args, kwargs)
            self._begin()
            settings = get_args()
            iterations = call.get("eval_iters") or settings.eval_iters
            size = settings.global_batch_size
            reading: Reading = call["data_iterator"]
            first = reading.position()
            addresses = [StepAddress(first + number * size, size) for number in range(iterations)]
            sums = self.engine.evaluate(call["forward_step_func"], reading.source, addresses)
            reading.consumed += iterations * size
            settings.consumed_valid_samples += iterations * size
            return {key: torch.tensor(total / count) for key, (total, count) in sums.items()}, None, False

        return replacement

    def _training_log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            call = bound(original, args, kwargs)
            if self._came_later and "is_first_iteration" in call:
                # Megatron carries a process's first step into its second line; a newcomer's is not the job's first.
                call["is_first_iteration"] = False
            if call["iteration"] % get_args().log_interval and not call.get("is_first_iteration"):
                return original(**call)
            totals = call["total_loss_dict"]
            before = copy.deepcopy(totals)

            def body() -> Any:
                totals.clear()
                totals.update(copy.deepcopy(before))
                return original(**call)

            result = self.engine.fenced(body, after_step=True)
            reporter.flush()
            return result

        return replacement

    def _parameter_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> float:
            return self.engine.parameter_norm()

        return replacement

    def _is_last_rank(self, original: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(original)
        def replacement() -> bool:
            return original() if self._engine is None else self._engine.is_reporter

        return replacement

    def _shutdown(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._engine is not None:
                self._engine.close()
            if self._links is not None:
                if self._checkpoints.unsaved:
                    self._leave(STATE_LOST, f"the last checkpoint is not saved: {self._checkpoints.unsaved}")
                self._links.membership.finish(0)
            return result

        return replacement


def _nominal_rng_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        call, state = bound(original, args, kwargs), parallel_state
        nominal = {
            "tp_group": GroupStandIn(
                state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
            ),
            "pp_group": GroupStandIn(
                state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
            ),
        }
        return original(**{**call, **{name: group for name, group in nominal.items() if name in call}})

    return replacement


def _without_barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(string: str, override_timestamp: float | None = None) -> None:
        moment = datetime.now() if override_timestamp is None else datetime.fromtimestamp(override_timestamp)
        training.print_rank_0(f"[{string}] datetime: {moment:%Y-%m-%d %H:%M:%S.%f} ")

    return replacement


def _starts_once(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start(self: Any, barrier: bool = False) -> None:
        if not self._started:
            original(self, barrier=False)

    return start


def _stops_once(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def stop(self: Any, barrier: bool = False) -> None:
        if self._started:
            original(self, barrier=False)

    return stop


def _pin_nominal_sizes() -> None:
    """Megatron's sizes and ranks stay those of the launch, whatever becomes of the groups."""
    parallel_state.set_tensor_model_parallel_rank(parallel_state.get_tensor_model_parallel_rank())
    parallel_state.set_tensor_model_parallel_world_size(parallel_state.get_tensor_model_parallel_world_size())
    parallel_state.set_pipeline_model_parallel_rank(parallel_state.get_pipeline_model_parallel_rank())
    parallel_state.set_pipeline_model_parallel_world_size(parallel_state.get_pipeline_model_parallel_world_size())
    parallel_state.set_data_parallel_rank(parallel_state.get_data_parallel_rank())
    parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE = parallel_state.get_data_parallel_world_size()
