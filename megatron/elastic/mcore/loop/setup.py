"""The set-up of a process before Megatron's loop begins: replacements for parts of ``pretrain()``.

initialize   links, membership, then Megatron's own groups over them
set up       the model without DDP, and the engine: together with all ranks, or, for a
             newcomer, once the members admit it (:meth:`Setup.admitted`)
load         Megatron's checkpoint, or the initial parameters
data         samples addressed by number, so any rank can read any of them
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.training import get_args, training
from megatron.training.checkpointing import load_checkpoint

from megatron.elastic.comm.exchange import gather_messages
from megatron.elastic.config import ElasticConfig
from megatron.elastic.engine.compute.model_interface import ForwardStep
from megatron.elastic.engine.compute.samples import SampleSource
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.transaction.agreement import RecoveryOutcome
from megatron.elastic.mcore.args.bad_input import unreadable_named, unwritable_cache_named
from megatron.elastic.mcore.args.batch_sizes import BatchSizes
from megatron.elastic.mcore.args.muon import qkv_parts
from megatron.elastic.mcore.args.preflight import check_validation
from megatron.elastic.mcore.args.settings import (
    engine_settings,
    expert_balance,
    expert_load,
    nominal_topology,
    sample_grid,
)
from megatron.elastic.mcore.checkpoint.absent_parts import AbsentParts
from megatron.elastic.mcore.checkpoint.launch_stage import Launched, LaunchStage
from megatron.elastic.mcore.checkpoint.other_model import other_model_named
from megatron.elastic.mcore.checkpoint.save_points import Checkpoints
from megatron.elastic.mcore.checkpoint.state_dict import without_holes
from megatron.elastic.mcore.checkpoint.verifying import verified
from megatron.elastic.mcore.loop import launch_sizes
from megatron.elastic.mcore.loop.data import source_for
from megatron.elastic.mcore.loop.evaluation import (
    Evaluated,
    EvaluatedSet,
    batches_of,
    count_evaluated,
    test_set,
    validation_sets,
)
from megatron.elastic.mcore.loop.first_pass import rehearsed
from megatron.elastic.mcore.loop.reporter import Reporter
from megatron.elastic.mcore.loop.way_back import tell
from megatron.elastic.mcore.model.context_parallel import ContextParallel
from megatron.elastic.mcore.model.delayed_scales import delayed_scaling
from megatron.elastic.mcore.model.dropout import key_dropout, unkeyed_line
from megatron.elastic.mcore.model.gpt import GptInterface, unwrapped
from megatron.elastic.mcore.model.layer_losses import LayerLosses
from megatron.elastic.mcore.model.model_builder import model_builder
from megatron.elastic.mcore.model.optimizer import EngineOptimizer, MegatronSchedule
from megatron.elastic.mcore.model.param_groups import GroupKeys, with_width
from megatron.elastic.mcore.model.units import refuse_frozen, refuse_others
from megatron.elastic.mcore.parallel_state.extra_ranks import as_of_the_launch, is_extra
from megatron.elastic.mcore.parallel_state.stage import as_first_of_tensor_group, as_stage
from megatron.elastic.mcore.patching.patches import Row, bound
from megatron.elastic.runtime.assembly import EngineParts
from megatron.elastic.runtime.connect import Links, open_links
from megatron.elastic.runtime.publish import RepeatedWork, publish_recovery
from megatron.elastic.runtime.start import found, join
from megatron.elastic.runtime.telemetry import write_recovery
from megatron.elastic.state.delayed_scaling import TensorScale
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.saved_contents import SavedContents, layout_digest

__all__ = ["Setup"]


class Setup:
    """Builds the engine of one process. ``counters``: returns the host's counters for newcomers."""

    def __init__(self, config: ElasticConfig, counters: Callable[[], Mapping[str, Any]]) -> None:
        self._config = config
        self._counters = counters
        self.reporter = Reporter()
        self.layer_losses = LayerLosses(lambda: bool(get_args().moe_per_layer_logging))
        self.context = ContextParallel()
        self.checkpoints = Checkpoints(config, lambda: self.engine, self.notice)
        self._repeated = RepeatedWork()
        self._links: Links | None = None
        self._job: EngineParts | None = None
        self._interface: GptInterface | None = None
        self._said: set[str] = set()
        """Lines about the present cells; each is said once while it holds."""
        self._engine: Engine | None = None
        self._optimizer: EngineOptimizer | None = None
        self._schedule: MegatronSchedule | None = None
        self._place: LaunchStage | None = None
        self._others: AbsentParts | None = None
        self._data: tuple[SampleSource | None, Evaluated, EvaluatedSet] | None = None
        self._evaluated_before = 0
        """Validation samples that were consumed before this job started, equal on all ranks."""

    @property
    def built(self) -> bool:
        """True if the engine exists: once the model is set up and, on a newcomer, once it is admitted."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """The engine; raises ``RuntimeError`` before it exists."""
        if self._engine is None:
            raise RuntimeError("the elastic engine is used before the model is set up")
        return self._engine

    @property
    def connected(self) -> bool:
        """True if this process has joined the control plane."""
        return self._links is not None

    @property
    def links(self) -> Links:
        """This process's control plane and communicator; raises ``RuntimeError`` before Megatron is initialized."""
        if self._links is None:
            raise RuntimeError("the elastic runtime is used before Megatron is initialized")
        return self._links

    def rows(self) -> tuple[Row, ...]:
        """(symbol, reason, replacement) for the patch table."""
        loop = "megatron.training.training."
        return (
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
                "samples are addressed by number, so any rank can read any sample of any step",
                self._build_data_iterators,
            ),
        )

    # -- initialize ------------------------------------------------------------------

    def _initialize_distributed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            settings = get_args()
            settings.rerun_mode = "disabled"
            self._links = open_links(self._config, 60.0 * settings.distributed_timeout_minutes)
            tell(self._links, settings)
            with as_of_the_launch(self._links.fabric, settings):
                result = original(*args, **kwargs)
            launch_sizes.pin_sizes()
            return result

        return replacement

    # -- set up ----------------------------------------------------------------------

    def _setup_model_and_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            call = bound(original, args, kwargs)
            return self._build(model_builder(call), call.get("checkpointing_context"))

        return replacement

    def _build(self, build_model: Callable[[], list[Any]], context: Any) -> tuple[Any, Any, Any]:
        args, links = get_args(), self.links
        get_rerun_state_machine().set_mode(RerunMode.DISABLED)
        model = build_model()
        refuse_others(model)
        refuse_frozen(model)
        optimizer_config, overrides = training.get_megatron_optimizer_config(args)
        overrides = with_width(overrides, optimizer_config, unwrapped(model[0]).config)
        groups = GroupKeys(optimizer_config, overrides, qkv_parts(args))
        unkeyed = [key_dropout(unwrapped(c), parallel_state.get_tensor_model_parallel_rank()) for c in model]
        line = unkeyed_line([name for names in unkeyed for name in names], self._config.exact)
        if line and links.decision is not None and links.fabric.rank == 0:
            print(line, flush=True)
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        group_of = functools.partial(links.fabric.group, "tensor")
        crew_of = functools.partial(links.fabric.group, "crew")
        context_of = functools.partial(links.fabric.group, "context")
        interface = self._interface = GptInterface(
            model, args, groups, first, group_of, self.layer_losses, crew_of, self.context, context_of
        )
        launched: Launched = {}
        if not is_extra(links.fabric, args):  # an extra rank writes no part of a checkpoint
            launched = {unit: tuple(interface.unit_parameters(unit)) for unit in interface.held_units()}
        self._place = LaunchStage(links.fabric.rank, interface, launched)
        self._optimizer = EngineOptimizer(groups, lambda: self.engine.record.loss_scale)
        scheduler = training.get_optimizer_param_scheduler(self._optimizer)
        self._schedule = MegatronSchedule(scheduler)
        config = unwrapped(model[0]).config
        sizes = BatchSizes()
        tied = interface.tied_unit is not None
        topology = nominal_topology(
            args, config, tied, links.fabric.slots, sizes.largest, self._config.replicas_of_a_rank
        )
        self._others = AbsentParts(topology, build_model, groups)
        of_layers = (expert_balance(args, config), expert_load(args, config), delayed_scaling(args, model))
        settings = engine_settings(args, self._schedule, sizes, *of_layers, groups.epsilons())
        self._job = EngineParts(
            interface, topology, self._config, settings, self._settled, self._host_state, self.notice, self._moved
        )
        args.iteration = args.num_floating_point_operations_so_far = 0
        if links.decision is None:  # a newcomer: the engine comes with admission, before the loop begins
            return model, self._optimizer, scheduler
        links.injector.reach("in_setup", 0)
        self._attach(found(links, self._job))
        if args.load is not None or args.pretrained_checkpoint is not None:
            flag = "--load" if args.load is not None else "--pretrained-checkpoint"
            folder = args.load or args.pretrained_checkpoint
            with (
                verified(args, links.fabric, lambda line: print(line, flush=True)) as manifest,
                without_holes(links.fabric, topology.slots),
                unreadable_named(flag, folder),
                other_model_named(flag, folder, args),
            ):
                args.iteration, args.num_floating_point_operations_so_far = load_checkpoint(
                    model, self._optimizer, scheduler, checkpointing_context=context
                )
            self._resume(scheduler, None if manifest is None else manifest.contents)
        else:
            self._resume(scheduler, None)
        return model, self._optimizer, scheduler

    def admitted(self, forward_step: ForwardStep, source: SampleSource | None) -> Mapping[str, Any]:
        """Wait until the members admit this newcomer, make the engine, and return the members' counters.

        ``forward_step`` and ``source``: those of the loop, for a rehearsal before that.
        """
        if self._job is None:
            raise RuntimeError("a newcomer cannot be admitted before its model is set up")
        first_pass = rehearsed(forward_step, source, self._job.interface.reads_data())
        engine, join_state = join(self.links, self._job, first_pass)
        self._attach(engine)
        self.reporter.hand_over(engine.is_reporter)
        assert self._schedule is not None
        host: Mapping[str, Any] = json.loads(join_state.host)
        self._schedule.take(host["schedule"], engine.record.scheduler_steps)
        self._evaluated_before = host["evaluated_before"]
        return host

    def _host_state(self) -> str:
        """Return the host's state for a newcomer, which has loaded no checkpoint."""
        assert self._schedule is not None
        mine = {"schedule": self._schedule.for_newcomer(), "evaluated_before": self._evaluated_before}
        return json.dumps({**self._counters(), **mine})

    def _attach(self, engine: Engine) -> None:
        """Set the engine, and make the objects that save and load its state."""
        assert self._optimizer is not None and self._place is not None and self._others is not None
        self._engine = engine
        self._optimizer.checkpoint = self.checkpoints.attach(self._place, self._others)

    def _resume(self, scheduler: Any, contents: SavedContents | None) -> None:
        """Start from the loaded checkpoint, or from the initial parameters. ``contents``: of the checkpoint."""
        args, engine = get_args(), self.engine
        assert self._optimizer is not None
        loaded, self._optimizer.loaded = self._optimizer.loaded, None
        scaler = {} if loaded is None else loaded.scaler
        record = replace(
            engine.record,
            version=args.iteration,
            scheduler_steps=scheduler.num_steps,
            consumed_samples=args.consumed_train_samples,
            loss_scale=float(scaler.get("scale", engine.record.loss_scale)),
            growth_tracker=int(scaler.get("growth_tracker", engine.record.growth_tracker)),
            hysteresis_tracker=int(scaler.get("hysteresis_tracker", engine.record.hysteresis_tracker)),
            expert_bias=self._loaded_bias(),
            fp8_scales=self._loaded_scales(),
        )
        record = record.at_adam_step(0 if loaded is None else loaded.adam_step, engine.tools.settings.hyper)
        saved = {} if contents is None or loaded is None else self._comparable(contents)
        engine.resume(record, None if loaded is None else loaded.state, saved)
        engine.tools.reach("in_setup", 0)

    def _loaded_bias(self) -> str:
        """Return the bias of all routers; each rank has loaded (or begun) that of its own layers. Collective."""
        balance, fabric = self.engine.tools.settings.hyper.balance, self.links.fabric
        if balance is None:
            return ""
        assert self._interface is not None
        everyone = gather_messages(fabric, dict[int, tuple[float, ...]], self._interface.launched_bias())
        return balance.text({unit: bias for found in everyone.values() for unit, bias in found.items()})

    def _loaded_scales(self) -> str:
        """Return the scales of all tensors in FP8, as :meth:`_loaded_bias` does. Collective."""
        scaling, fabric = self.engine.tools.settings.hyper.scaling, self.links.fabric
        if scaling is None:
            return ""
        assert self._interface is not None
        mine = self._interface.launched_scales(scaling.window)
        everyone = gather_messages(fabric, dict[int, tuple[TensorScale, ...]], mine)
        return scaling.text({unit: tensors for found in everyone.values() for unit, tensors in found.items()})

    def _comparable(self, contents: SavedContents) -> Mapping[BlockKey, str]:
        """Return the hashes with which the loaded state is compared; none, with one line, if blocks are cut anew."""
        if contents.layout == layout_digest(self.engine.views.layouts):
            return contents.blocks
        if self.links.fabric.rank == self.links.fabric.alive[0]:
            print("--load: the state is not compared with the saved one: it was cut for other sizes", flush=True)
        return {}

    # -- data ------------------------------------------------------------------------

    def _build_data_iterators(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if self._data is None:  # Megatron calls this for each model chunk; any chunk may read any sample
                self._data = self._sources(bound(original, args, kwargs)["build_train_valid_test_datasets_provider"])
            return self._data

        return replacement

    def _sources(self, provider: Any) -> tuple[SampleSource | None, Evaluated, EvaluatedSet]:
        args = get_args()
        if args.iteration > 0 and args.consumed_train_samples == 0:
            args.consumed_train_samples = args.iteration * args.global_batch_size
        count_evaluated(args)
        if self._engine is not None:
            self._engine.tools.reach("in_setup", 0)
        # Megatron builds data sets only for both ends of a pipeline, on the first rank of a tensor-parallel group. Any
        # rank may come to be that, after a loss or with other parallel sizes, so all build them.
        training_set, validation, test = self._datasets(provider)
        check_validation(args, training_set, validation)
        self._evaluated_before = args.consumed_valid_samples
        evaluates = args.eval_iters > 0
        flags = torch.tensor(
            [
                int(args.train_iters > 0),
                int(evaluates or args.full_validation),
                int(evaluates and test is not None),
            ]
        )
        torch.distributed.broadcast(flags, 0)
        args.do_train, args.do_valid, args.do_test = (bool(flag) for flag in flags.tolist())
        grid = sample_grid(args, BatchSizes().largest)
        tested = test_set(test, args, grid)
        validated = validation_sets(validation, args, grid, lambda: self._evaluated_before)
        args.eval_iters = batches_of(validated)
        return source_for(training_set, args, grid), validated, tested

    def _datasets(self, provider: Any) -> Any:
        """Return Megatron's data sets for training, validation and test.

        Rank 0 writes the indices of the data where they are not written yet, and the others of the launch wait for
        that. A newcomer, such as a spare that starts with the job, is in no group with them. If it cannot read the
        indices, it waits until all members have begun, and so have read them. Then it reads again.
        """
        args = get_args()

        def build() -> Any:
            with as_stage(0, 1), as_first_of_tensor_group(), unwritable_cache_named(args.data_cache_path):
                return training.build_train_valid_test_datasets(provider)

        try:
            return build()
        except Exception:
            if self.links.decision is not None:
                raise
        self.links.membership.await_begin(60.0 * args.distributed_timeout_minutes)
        return build()

    # -- log lines of the engine -----------------------------------------------------

    def _settled(self, outcome: RecoveryOutcome, view: View, seconds: float) -> None:
        engine, links = self.engine, self.links
        self.reporter.hand_over(engine.is_reporter)
        # A newcomer does not know the recovery that admitted it.
        speaks = min(set(view.living) - set(outcome.newcomers)) == links.fabric.rank
        step = engine.present_step
        event = write_recovery(links.events, outcome, view, step, engine.in_step, seconds, speaks)
        again = engine.in_step and outcome.resolution.kind == "rerun" and not outcome.step_committed
        repeated_s = self._repeated.seconds(engine.context.timer, again)
        if speaks:
            publish_recovery(links.membership, outcome, event, repeated_s)
        self._tell_of_cells(view, speaks)

    def _moved(self, view: View) -> None:
        self._tell_of_cells(view, view.lowest)

    def _tell_of_cells(self, view: View, speaks: bool) -> None:
        """Print a line for each cell that computes without sequence parallelism, once as long as it does."""
        assert self._interface is not None
        said = {self._interface.whole_sequence_line(cell.ranks) for cell in view.plan.cells} - {""}
        for line in sorted(said - self._said) if speaks else ():
            print(line, flush=True)
        self._said = said

    def notice(self, why: str) -> None:
        """Print one line on one of the ranks that all call this, also before a decided generation begins its steps."""
        if self._engine is None or self._engine.behind:
            return
        living = self._engine.agreement.members or self._engine.view.living
        if living[0] == self.links.fabric.rank:
            print(why, flush=True)
