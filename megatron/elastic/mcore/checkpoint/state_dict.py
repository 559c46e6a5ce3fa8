"""The engine's optimizer state in Megatron's own checkpoint format and keys.

Formats are Megatron's by construction. To save or load, this module builds the optimizer that plain Megatron would
build for these arguments over the same parameters, and takes its sharded state dict. A save fills that optimizer from
the state blocks; a load reads it into them. Plain Megatron can therefore resume a checkpoint written here, and vice
versa, at any layout to which torch_dist can reshard.

With ``--use-distributed-optimizer`` the fully reshardable form is written, whose
tensors have the same keys; the form tied to one data-parallel size is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.training import checkpointing
from torch.distributed import distributed_c10d as c10d

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.config import ConfigError
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.transaction.save import Want
from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.args.optimizers import OF_MATRICES
from megatron.elastic.mcore.checkpoint.absent_parts import AbsentParts, Duty
from megatron.elastic.mcore.checkpoint.content import Content
from megatron.elastic.mcore.checkpoint.launch_stage import LaunchStage
from megatron.elastic.mcore.checkpoint.momentum_state import (
    ADAM,
    LION,
    MUON_MOMENTUM,
    SGD,
    begin_sgd,
    momentum_shadow,
)
from megatron.elastic.mcore.model.param_groups import settings_of
from megatron.elastic.mcore.parallel_state.stage import GroupStandIn
from megatron.elastic.state.layout import ParamSlot, UnitShard
from megatron.elastic.state.record import StepRecord

__all__ = ["LoadedState", "OptimizerCheckpoint", "groups_in_file", "told_apart", "with_empty_groups", "without_holes"]

_RESHARDABLE = "fully_reshardable"
_MASTERS = "fp32_from_fp16_params"
_OPTIMIZER, _IDENTIFIERS = "optimizer", param_group_identifier_keys
_DEFAULT = "default_config"
"""Megatron's name of whether a parameter group has the learning rates of the flags."""


@dataclass(frozen=True)
class LoadedState:
    """Optimizer state read from a checkpoint."""

    state: Mapping[UnitShard, torch.Tensor]
    """(unit, shard) → fp32 ``[3, numel]`` (master, exp_avg, exp_avg_sq)."""
    adam_step: int
    scaler: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    """The checkpoint's schedule settings of each parameter group, in the engine's order."""


class OptimizerCheckpoint:
    """Translates between state blocks and Megatron's optimizer classes."""

    def __init__(self, engine: Engine, own: LaunchStage, config: OptimizerConfig, others: AbsentParts) -> None:
        self._engine = engine
        self._own = own
        self._others = others
        self._duties: dict[Duty, LaunchStage] = {}
        self._built: dict[int, LaunchStage] = {}
        self._config = replace(config, use_distributed_optimizer=False)
        self._groups: Sequence[Mapping[str, Any]] = ()
        self._reading: list[tuple[LaunchStage, Any]] = []
        """Parts of the checkpoint that is being read, with the optimizers that Megatron fills."""
        self.content: Content | None = None
        """Content of the save being planned."""

    def save(self, model_state: Any, groups: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> Any:
        """Return a sharded state dict to plan a save over; its tensors are empty and registered in :attr:`content`."""
        return self._saved(self._parts(self._own), model_state, groups, metadata)

    def whole(
        self, state_dict: Any, args: Any, groups: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]
    ) -> Any:
        """Return the state dict of a save, extended by the parts of other ranks that this rank writes.

        Without optimizer state (--no-save-optim) the parameters of the model are registered here.
        """
        if args.no_save_optim:
            self._register_parameters(self._own)
        found = {
            duty.rank: self._saved_for(duty, place, args, groups, metadata) for duty, place in self._duties.items()
        }
        return state_dict | {f"rank {rank}": part for rank, part in found.items() if part}

    @contextmanager
    def as_launched(self, others: Collection[Duty] = ()) -> Iterator[None]:
        """Give models the launch's shapes inside the context, for planning; ``others``: also written by this rank."""
        for duty in others:
            if duty.rank not in self._built:
                self._built[duty.rank] = self._others.place(duty.rank)
        self._duties = {duty: self._built[duty.rank] for duty in others}
        with ExitStack() as stack:
            stack.callback(self._duties.clear)
            hyper, record = self._engine.tools.settings.hyper, self._engine.record
            bias = {} if hyper.balance is None else hyper.balance.by_unit(record.expert_bias)
            scales = {} if hyper.scaling is None else hyper.scaling.tensors(record.fp8_scales)
            for place in (self._own, *self._duties.values()):
                place.interface.set_expert_bias(bias)
                place.interface.keep_scales(scales)
                stack.enter_context(place.interface.as_launched())
            yield

    def _saved(
        self,
        parts: Sequence[LaunchStage],
        model_state: Any,
        groups: Sequence[Mapping[str, Any]],
        metadata: Mapping[str, Any],
    ) -> Any:
        states = []
        for part in parts:
            shadow = self._shadow(part, groups)
            self._lay_out(part, shadow, self._engine.record)
            states.append(self._state_dict(part, shadow, model_state, metadata, loading=False))
        return _chained(states)

    def _saved_for(
        self,
        duty: Duty,
        place: LaunchStage,
        args: Any,
        groups: Sequence[Mapping[str, Any]],
        metadata: Mapping[str, Any],
    ) -> Any:
        """Return the tensors and objects of a duty as its rank would write them; each carries its own key."""
        alone = {**metadata, "dp_cp_group": GroupStandIn(0, 1)}
        chunks: Any = place.interface.chunks
        parts = [part for part in self._parts(place) if _concerns(duty, part)]
        with self._others.standing_at(duty.rank):
            model = {f"model{at}": chunk.sharded_state_dict(metadata=alone) for at, chunk in enumerate(chunks)}
            whole = dict(model)
            if args.no_save_optim:
                self._register_parameters(place)
            else:
                whole["optimizer"] = self._saved(parts, model, groups, alone)
            if not args.no_save_rng:
                whole["rng_state"] = checkpointing.get_rng_state("torch_dist", None, None)
        return extract_matching_values(whole, lambda value: isinstance(value, ShardedBase) and duty.has(value.key))[0]

    def begin_load(self, model_state: Any, groups: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> Any:
        """Return a sharded state dict to read a checkpoint into; pass the result to :meth:`finish_load`."""
        self._groups = groups
        self._reading = [(part, self._shadow(part, groups)) for part in self._parts(self._own)]
        return _chained(
            [self._state_dict(part, shadow, model_state, metadata, loading=True) for part, shadow in self._reading]
        )

    def finish_load(self, state_dict: Any) -> LoadedState:
        """Return the loaded state. Raises ``ConfigError`` for state of another number of optimizers."""
        reading, self._reading = self._reading, []
        _require_optimizers(state_dict, len(reading))
        state = self._engine.empty_state()
        states = [state_dict] if len(reading) == 1 else [state_dict[number] for number in range(len(reading))]
        read = [self._read(*part, found, state) for part, found in zip(reading, states, strict=True)]
        found: dict[int, Mapping[str, Any]] = {}
        for (place, _), part in reversed(list(zip(reading, read, strict=True))):
            mine = {at: self._groups[at] for at in sorted(self._groups_of(place, False))}
            found |= groups_in_file(mine, part.groups)
        settings = [settings_of(found.get(at, {})) for at in range(len(self._groups))]
        return replace(read[0], adam_step=max(part.adam_step for part in read), groups=settings)

    def _read(
        self, place: LaunchStage, shadow: Any, state_dict: Any, state: Mapping[UnitShard, torch.Tensor]
    ) -> LoadedState:
        """Fill the parameters of ``place`` in ``state``; return the loaded state, with the checkpoint's own groups."""
        if state_dict.get("param_state_sharding_type") == _RESHARDABLE:
            step = _group_step(state_dict["optimizer"]["param_groups"])
            groups = state_dict["optimizer"]["param_groups"]
            tensors = [state_dict["param_state"][i] for i in range(len(state_dict["param_state"]))]
            mains = [entry["param"] for entry in tensors]
        else:
            inner = state_dict.get("optimizer", state_dict)
            groups = inner["param_groups"]
            inner["param_groups"] = told_apart(shadow.optimizer.param_groups, groups)
            if _MASTERS in state_dict:
                state_dict[_MASTERS] = with_empty_groups(state_dict[_MASTERS], shadow.fp32_from_float16_groups)
            _set_step_zero(inner["state"])
            shadow.load_state_dict(state_dict)
            mains = _main_parameters(shadow)
            tensors = [shadow.optimizer.state[main] for main in mains]
            step = (
                int(tensors[0]["step"])
                if tensors and "step" in tensors[0]
                else _group_step(shadow.optimizer.param_groups)
            )
        for (key, slot), main, moments in zip(self._slots(place), mains, tensors, strict=True):
            rows = state[key][:, slot.start : slot.stop]
            for row, value in zip(rows, (main, *(moments[name] for name in self._names(place))), strict=False):
                row.copy_(value.detach().reshape(-1))
        follows = self._engine.tools.settings.hyper.scaler == "dynamic"  # no other scale is read from a checkpoint
        return LoadedState(state, step, dict(state_dict.get("grad_scaler") or {}) if follows else {}, groups)

    # -- Megatron's optimizer over the engine's parameters ------------------------------

    def _parts(self, place: LaunchStage) -> tuple[LaunchStage, ...]:
        """Return the parts of a stage for which Megatron has optimizers of their own, in Megatron's order.

        Matrices that Muon or Lion steps come before all others, experts that ranks share after what is alike.
        ``dist_muon`` has one optimizer for all matrices; Megatron's layer-wise optimizer has one for all others too.
        """
        shares, of_matrices = bool(self._engine.views.launch_topology.experts), self._config.optimizer in OF_MATRICES
        if not (shares or of_matrices):
            return (place,)
        if not of_matrices:
            return place.part((False,), False), place.part((True,), False)
        apart = [(False,), (True,)] if shares else [(False,)]
        layerwise = getattr(self._config, "use_layer_wise_distributed_optimizer", False)
        parts = [
            place.part(experts, matrices)
            for matrices, together in ((True, layerwise or self._config.optimizer == "dist_muon"), (False, layerwise))
            for experts in ([(False, True)] if shares and together else apart)
        ]
        # No rank has other parameters of experts where these have no biases.
        return tuple(part for part in parts if part.experts != (True,) or self._groups_of(part, True))

    def _groups_of(self, place: LaunchStage, shared: bool) -> frozenset[int]:
        """Return the parameter groups that parts like ``place`` have on any rank; ``shared``: of their experts."""
        slots = (slot.spec for layout in self._engine.views.layouts.values() for slot in layout.slots)
        return frozenset(spec.group for spec in slots if place.has(spec) and (spec.expert is not None) == shared)

    def _names(self, place: LaunchStage) -> tuple[str, ...]:
        """Return the names of a parameter's state in Megatron's optimizer, in the order of a block's rows."""
        if self._config.optimizer == "sgd":
            return SGD
        if not place.matrices:
            return ADAM
        return LION if self._config.optimizer == "lion" else MUON_MOMENTUM

    def _slots(self, place: LaunchStage) -> Iterator[tuple[UnitShard, ParamSlot]]:
        """Return ((unit, shard), slot in that flat state) of each of ``place.ordered()``."""
        layouts, topology = self._engine.views.layouts, self._engine.views.launch_topology
        home = dict[int, tuple[UnitShard, ParamSlot]]()
        for unit, parameters in place.launched.items():
            for item in parameters:
                key = unit, topology.shard_of(place.rank, item.spec)
                home[id(item.parameter)] = key, layouts[key].slot(item.spec.name)
        return iter([home[id(item.parameter)] for item in place.ordered()])

    def _shadow(self, place: LaunchStage, groups: Sequence[Mapping[str, Any]]) -> Any:
        """Return Megatron's optimizer for these arguments; its own copies of parameters are fp32."""
        ordered, of_matrices = place.ordered(), self._config.optimizer in OF_MATRICES
        # By this name Megatron tells such groups from those of matrices, from release 0.18 on.
        beside = {_OPTIMIZER: "adam"} if of_matrices and not place.matrices and _OPTIMIZER in _IDENTIFIERS else {}
        filled = []
        for shared in place.experts:
            for index in sorted(self._groups_of(place, shared)):
                alike = [i for i in ordered if (i.spec.group, i.spec.expert is not None) == (index, shared)]
                mine = {"params": [item.parameter for item in alike], "is_expert_parallel": shared}
                filled.append({**groups[index], **mine, **beside})
        if place.matrices:
            return momentum_shadow(self._config, filled)
        shadow = core_optimizer._get_megatron_optimizer_based_on_param_groups(
            config=replace(self._config, optimizer="adam") if of_matrices else self._config,
            model_chunks=list(place.interface.chunks),  # looked at for FSDP alone, which no chunk is
            param_groups=filled,
            per_model_buffers=None,
            model_parallel_group=parallel_state.get_model_parallel_group(),
        )
        if self._config.optimizer == "sgd":
            shadow.init_state_fn = begin_sgd
        return shadow

    def _register_parameters(self, place: LaunchStage) -> None:
        """Register the model's parameters in the content as the masters in the state blocks."""
        assert self.content is not None, "a save is planned by BackgroundSave"
        for item, (key, slot) in zip(place.ordered(), self._slots(place), strict=True):
            self.content.register(item.parameter.data, Want(*key, slot.start, slot.stop, 0))

    def _lay_out(self, place: LaunchStage, shadow: Any, record: StepRecord) -> None:
        """Give the shadow optimizer state of the right shapes, and register its tensors in the content."""
        assert self.content is not None, "a save is planned by BackgroundSave"
        step = torch.tensor(float(record.adam_step))
        for main, item, (key, slot) in zip(_main_parameters(shadow), place.ordered(), self._slots(place), strict=True):
            master, first, second = (Want(*key, slot.start, slot.stop, row) for row in range(3))
            rows = dict(zip(self._names(place), (first, second), strict=False))
            moments = {name: torch.empty(main.shape, dtype=torch.float32) for name in rows}
            counted = {"step": step.clone()} if self._names(place) == ADAM else {}
            shadow.optimizer.state[main] = {**counted, **moments}
            for name, want in rows.items():
                self.content.register(moments[name], want)
            self.content.register(item.parameter.data, master)
            if main.data_ptr() != item.parameter.data_ptr():
                self.content.register(main.data, master)
        scaler = getattr(shadow, "grad_scaler", None)
        if scaler is not None and self._engine.tools.settings.hyper.scaler == "dynamic":
            scaler._scale.fill_(record.loss_scale)
            scaler._growth_tracker = record.growth_tracker
            scaler._hysteresis_tracker = record.hysteresis_tracker

    def _state_dict(
        self, place: LaunchStage, shadow: Any, model_state: Any, metadata: Mapping[str, Any], loading: bool
    ) -> Any:
        kind = metadata.get("distrib_optim_sharding_type")
        if kind is None:
            return shadow.sharded_state_dict(model_state, is_loading=loading, metadata=dict(metadata))
        if kind != _RESHARDABLE:
            raise ConfigError(
                f"--load holds optimizer state in the {kind} form, which fits one data-parallel size: load it without "
                "--elastic and save it with --dist-ckpt-optim-fully-reshardable, or add --no-load-optim"
            )
        return self._reshardable(place, shadow, model_state, loading)

    def _reshardable(self, place: LaunchStage, shadow: Any, model_state: Any, loading: bool) -> dict[str, Any]:
        """Return the state that ``DistributedOptimizer`` writes in its fully reshardable form."""
        if loading:
            shadow.init_state_fn(shadow.optimizer, self._config)
        mains, step = _main_parameters(shadow), self._engine.record.adam_step
        sharded = get_param_id_to_sharded_param_map(model_state, [item.parameter for item in place.ordered()])
        states = [shadow.optimizer.state[main] for main in mains]
        param_state = {
            i: {
                key: make_sharded_optimizer_tensor(sharded[i], value, prefix=f"optimizer.state.{key}")
                for key, value in (
                    # The model's own fp32 parameters are masters too; a copy keeps loading apart from them.
                    ("param", main.detach().clone() if loading else main.detach()),
                    *((name, state[name]) for name in self._names(place)),
                )
            }
            for i, (main, state) in enumerate(zip(mains, states, strict=True))
        }
        groups = [{k: v for k, v in g.items() if k != "params"} | {"step": step} for g in shadow.optimizer.param_groups]
        result: dict[str, Any] = {
            "optimizer": {"param_groups": groups},
            "param_state": param_state,
            "param_state_sharding_type": _RESHARDABLE,
        }
        if getattr(shadow, "grad_scaler", None) is not None:
            result["grad_scaler"] = shadow.grad_scaler.state_dict()
        return result


def with_empty_groups(found: Sequence[Any], groups: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the masters read for each of ``groups``: a checkpoint leaves out the list of a group without parameters.

    With Muon or Lion a stage in the middle has such a group: Adam steps matrices at both ends only.
    """
    if len(found) == len(groups):
        return list(found)
    rest = iter(found)
    return [next(rest) if group else [] for group in groups]


def _set_step_zero(states: dict[Any, Any]) -> None:
    """Set Adam's step where a checkpoint has none: Megatron leaves out 0, as after skipped steps alone."""
    if "common_step" not in states and any("exp_avg_sq" in each and "step" not in each for each in states.values()):
        states["common_step"] = torch.tensor(0.0)


def _concerns(duty: Duty, place: LaunchStage) -> bool:
    """Return whether a part of a stage has parameters of a duty."""
    return any(duty.experts if shared else duty.rest for shared in place.experts)


def _chained(states: Sequence[Any]) -> Any:
    """Return the state of several optimizers as Megatron's ``ChainedOptimizer`` does: one alone, others numbered."""
    return states[0] if len(states) == 1 else dict(enumerate(states))


def _require_optimizers(state_dict: Mapping[Any, Any], count: int) -> None:
    """Raise ``ConfigError`` unless a checkpoint was written by ``count`` optimizers (:func:`_chained`)."""
    numbered = [key for key in state_dict if isinstance(key, int)]
    if len(numbered) == (count if count > 1 else 0) and len(numbered) in (0, len(state_dict)):
        return
    raise ConfigError(
        "--load: Megatron keeps optimizer state of experts that ranks share apart from the rest, and that of matrices "
        "for Muon and Lion, and this checkpoint and --expert-model-parallel-size or --optimizer differ in that: use a "
        "size above 1 for both, or 1, and one optimizer, or add --no-load-optim"
    )


def _main_parameters(shadow: Any) -> list[torch.Tensor]:
    return [p for group in shadow.optimizer.param_groups for p in group["params"]]


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key by which Megatron identifies a parameter group of a checkpoint, whatever optimizer steps it."""
    return tuple(group.get(name) for name in _IDENTIFIERS if name != _OPTIMIZER)


def groups_in_file(
    groups: Mapping[int, Mapping[str, Any]], found: Sequence[Mapping[str, Any]]
) -> dict[int, Mapping[str, Any]]:
    """Return the one of ``found``, a checkpoint's parameter groups, that each of ``groups`` is, by its index.

    Megatron identifies a group by a few settings, which several groups may share: ``--decoupled-lr`` is none of them.
    These are told apart by whether they have learning rates of their own, and then by their order, which is that of
    Megatron. If a checkpoint has another number of them, each is the last one there, as in Megatron.
    """
    told = all(_DEFAULT in group for group in found)
    of_file: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for group in found:
        of_file.setdefault((*_identity(group), told and group[_DEFAULT]), []).append(group)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for at, group in groups.items():
        alike.setdefault((*_identity(group), told and group[_DEFAULT]), []).append(at)
    result: dict[int, Mapping[str, Any]] = {}
    for identity, mine in alike.items():
        theirs = of_file.get(identity, [])
        if theirs:
            result |= zip(mine, theirs if len(theirs) == len(mine) else theirs[-1:] * len(mine), strict=True)
    return result


def told_apart(groups: Sequence[dict[str, Any]], found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ``found`` such that Megatron takes each for the one of ``groups`` at its place, whose parameters it has.

    Megatron's load would give two groups that it cannot tell apart the parameters of one of them. Numbers for
    ``lr_mult``, which nothing reads here, make all different. Raises :class:`BadInput` for another number of groups.
    """
    if len(found) != len(groups):
        raise BadInput(
            f"the checkpoint has {len(found)} parameter groups, and this run {len(groups)}: use its flags for learning "
            "rates and weight decay, or add --no-load-optim"
        )
    for number, group in enumerate(groups):
        group["lr_mult"] = float(number)
    names = [name for name in _IDENTIFIERS if all(name in group for group in groups)]
    return [{**theirs, **{name: mine[name] for name in names}} for mine, theirs in zip(groups, found, strict=True)]


def _group_step(groups: Sequence[Mapping[str, Any]]) -> int:
    steps = {int(group["step"]) for group in groups if group.get("step") is not None}
    if len(steps) > 1:
        raise ConfigError(
            "--load: optimizer steps differ between the checkpoint's parameter "
            f"groups ({sorted(steps)}): choose another one"
        )
    return steps.pop() if steps else 0


@contextmanager
def without_holes(fabric: Fabric, slots: int) -> Iterator[None]:
    """Make the living of the first ``slots`` ranks the default group, numbered from 0, inside the context.

    The data-parallel rank is renumbered too, over all ranks that have the same weights. Megatron's checkpoint code
    divides work by world size and has rank 0 write metadata and data-parallel rank 0 write for its peers;
    it does not support empty slots.
    """
    living = [rank for rank in fabric.alive if rank < slots]
    before = parallel_state.get_data_parallel_rank()
    parallel_state.set_data_parallel_rank(parallel_state.get_data_parallel_group(with_context_parallel=True).rank())
    try:
        with nullcontext() if len(living) == fabric.slots else _default_group(fabric, living):
            yield
    finally:
        parallel_state.set_data_parallel_rank(before)


@contextmanager
def _default_group(fabric: Fabric, living: Sequence[int]) -> Iterator[None]:
    """Make ``living`` the default group, numbered from 0, inside the context."""
    dense = fabric.group("checkpoint", living)
    table = c10d._world.pg_group_ranks
    numbered = table[dense]
    # The ranks of a default group are global ranks: a root is named by the result of get_rank().
    table[dense] = {rank: rank for rank in range(len(living))}
    c10d._update_default_pg(dense)
    try:
        yield
    finally:
        c10d._update_default_pg(fabric.world)
        table[dense] = numbered
