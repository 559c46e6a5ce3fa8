"""The engine's optimizer state in Megatron's own checkpoint format and keys.

Formats are Megatron's by construction: for saving and loading, the optimizer
that plain Megatron would have built for these arguments is put together over
the same parameters, filled from (or read into) the state blocks, and asked for
its sharded state dict. A checkpoint written here is therefore resumed by plain
Megatron, and the other way round, at any layout torch_dist can reshard to.

With ``--use-distributed-optimizer`` the fully reshardable form is written, whose
tensors have the same keys; the form tied to one data-parallel size is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch.distributed import distributed_c10d as c10d

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.config import ConfigError
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.port import UnitParameter
from megatron.elastic.engine.saving import Want
from megatron.elastic.mcore.checkpoint_content import Content
from megatron.elastic.mcore.model import GptPort
from megatron.elastic.state.layout import ParamSlot
from megatron.elastic.state.record import StepRecord

__all__ = ["Launched", "LoadedState", "OptimizerCheckpoint", "without_holes"]

_RESHARDABLE = "fully_reshardable"


@dataclass(frozen=True)
class LoadedState:
    """Optimizer state read from a checkpoint: ``units[u]`` is fp32 ``[3, numel]`` (master, exp_avg, exp_avg_sq)."""

    units: Mapping[int, torch.Tensor]
    adam_step: int
    scaler: Mapping[str, Any]


Launched = Mapping[int, Sequence[UnitParameter]]
"""Unit → parameters of this rank's place at launch. That is what it writes, whatever it computes meanwhile."""


class OptimizerCheckpoint:
    """Translates between state blocks and Megatron's optimizer classes."""

    def __init__(self, engine: Engine, port: GptPort, config: OptimizerConfig, launched: Launched) -> None:
        self._engine = engine
        self._port = port
        self._launched = launched
        self._config = replace(config, use_distributed_optimizer=False)
        self._reading: Any = None
        self.content: Content | None = None
        """Of the save being planned."""

    def save(self, model_state: Any, groups: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> Any:
        """Sharded state dict to plan a save over; its tensors are registered in :attr:`content`, and empty."""
        shadow = self._shadow(groups)
        self._lay_out(shadow, self._engine.record)
        return self._state_dict(shadow, model_state, metadata, loading=False)

    def as_launched(self) -> AbstractContextManager[None]:
        """Inside, the model has the shapes of the launch, for Megatron to plan over."""
        return self._port.as_launched()

    def begin_load(self, model_state: Any, groups: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> Any:
        """Sharded state dict to read a checkpoint into; :meth:`finish_load` takes what was read."""
        self._reading = self._shadow(groups)
        return self._state_dict(self._reading, model_state, metadata, loading=True)

    def finish_load(self, state_dict: Any) -> LoadedState:
        """What was read, by unit."""
        shadow, self._reading = self._reading, None
        if state_dict.get("param_state_sharding_type") == _RESHARDABLE:
            step = _group_step(state_dict["optimizer"]["param_groups"])
            tensors = [state_dict["param_state"][i] for i in range(len(state_dict["param_state"]))]
            mains = [entry["param"] for entry in tensors]
        else:
            shadow.load_state_dict(state_dict)
            mains = _main_parameters(shadow)
            tensors = [shadow.optimizer.state[main] for main in mains]
            step = int(tensors[0]["step"]) if tensors and "step" in tensors[0] else _group_step(
                shadow.optimizer.param_groups
            )
        units = self._engine.empty_state()
        for (unit, slot), main, state in zip(self._slots(), mains, tensors, strict=True):
            rows = units[unit][:, slot.start : slot.stop]
            for row, value in zip(rows, (main, state["exp_avg"], state["exp_avg_sq"]), strict=True):
                row.copy_(value.detach().reshape(-1))
        return LoadedState(units, step, dict(state_dict.get("grad_scaler") or {}))

    # -- Megatron's optimizer over our parameters ---------------------------------------

    def _ordered(self) -> list[UnitParameter]:
        """Trainable parameters in the order of Megatron's groups."""
        items = [item for parameters in self._launched.values() for item in parameters]
        rank = {id(p): i for i, p in enumerate(self._port.chunk.parameters())}
        return sorted(items, key=lambda item: (item.spec.group, rank[id(item.parameter)]))

    def _slots(self) -> Iterator[tuple[int, ParamSlot]]:
        """(unit, place in its flat state) of each of :meth:`_ordered`."""
        layouts, shard = self._engine.recovery.layouts, self._shard
        home = {
            id(item.parameter): (unit, layouts[unit, shard].slot(item.spec.name))
            for unit, parameters in self._launched.items()
            for item in parameters
        }
        return iter([home[id(item.parameter)] for item in self._ordered()])

    @property
    def _shard(self) -> int:
        return self._engine.recovery.nominal.place(self._engine.tools.fabric.rank)[0]

    def _shadow(self, groups: Sequence[Mapping[str, Any]]) -> Any:
        """Megatron's optimizer for these arguments; its own copies of parameters are fp32."""
        ordered = self._ordered()
        filled = [
            {**group, "params": [item.parameter for item in ordered if item.spec.group == index]}
            for index, group in enumerate(groups)
        ]
        return core_optimizer._get_megatron_optimizer_based_on_param_groups(
            config=self._config,
            model_chunks=[],
            param_groups=filled,
            per_model_buffers=None,
            model_parallel_group=parallel_state.get_model_parallel_group(),
        )

    def _lay_out(self, shadow: Any, record: StepRecord) -> None:
        """Give the shadow a state of the right shapes, and tell the content which tensor shows what."""
        assert self.content is not None, "a save is planned by BackgroundSave"
        step = torch.tensor(float(record.adam_step))
        shard = self._shard
        for main, item, (unit, slot) in zip(_main_parameters(shadow), self._ordered(), self._slots(), strict=True):
            master, first, second = (Want(unit, shard, slot.start, slot.stop, row) for row in range(3))
            exp_avg, exp_avg_sq = (torch.empty(main.shape, dtype=torch.float32) for _ in range(2))
            shadow.optimizer.state[main] = {"step": step.clone(), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            self.content.register(exp_avg, first)
            self.content.register(exp_avg_sq, second)
            self.content.register(item.parameter.data, master)
            if main.data_ptr() != item.parameter.data_ptr():
                self.content.register(main.data, master)
        scaler = getattr(shadow, "grad_scaler", None)
        if scaler is not None and self._engine.tools.settings.hyper.scaler == "dynamic":
            scaler._scale.fill_(record.loss_scale)
            scaler._growth_tracker = record.growth_tracker
            scaler._hysteresis_tracker = record.hysteresis_tracker

    def _state_dict(self, shadow: Any, model_state: Any, metadata: Mapping[str, Any], loading: bool) -> Any:
        kind = metadata.get("distrib_optim_sharding_type")
        if kind is None:
            return shadow.sharded_state_dict(model_state, is_loading=loading, metadata=dict(metadata))
        if kind != _RESHARDABLE:
            raise ConfigError(
                f"--use-distributed-optimizer would write {kind} checkpoints, which only fit one data-parallel size: "
                "add --dist-ckpt-optim-fully-reshardable"
            )
        return self._reshardable(shadow, model_state, loading)

    def _reshardable(self, shadow: Any, model_state: Any, loading: bool) -> dict[str, Any]:
        """What ``DistributedOptimizer`` writes in its fully reshardable form."""
        if loading:
            shadow.init_state_fn(shadow.optimizer, self._config)
        mains, step = _main_parameters(shadow), self._engine.record.adam_step
        sharded = get_param_id_to_sharded_param_map(model_state, [item.parameter for item in self._ordered()])
        states = [shadow.optimizer.state[main] for main in mains]
        param_state = {
            i: {
                key: make_sharded_optimizer_tensor(sharded[i], value, prefix=f"optimizer.state.{key}")
                for key, value in (
                    # The model's own fp32 parameters are masters too; a copy keeps loading apart from them.
                    ("param", main.detach().clone() if loading else main.detach()),
                    ("exp_avg", state["exp_avg"]),
                    ("exp_avg_sq", state["exp_avg_sq"]),
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


def _main_parameters(shadow: Any) -> list[torch.Tensor]:
    return [p for group in shadow.optimizer.param_groups for p in group["params"]]


def _group_step(groups: Sequence[Mapping[str, Any]]) -> int:
    steps = {int(group["step"]) for group in groups if group.get("step") is not None}
    if len(steps) > 1:
        raise ConfigError(f"--load: the checkpoint's optimizer steps differ between parameter groups: {sorted(steps)}")
    return steps.pop() if steps else 0


@contextmanager
def without_holes(fabric: Fabric) -> Iterator[None]:
    """Inside, the default group is the living ranks, numbered from 0, and so is the data-parallel rank.

    Megatron's checkpoint code divides work by world size, has rank 0 write
    metadata and data-parallel rank 0 write what its peers hold too; it knows no
    empty slots.
    """
    if len(fabric.alive) == fabric.slots:
        yield
        return
    dense = fabric.group("checkpoint", fabric.alive)
    table = c10d._world.pg_group_ranks
    numbered = table[dense]
    # As a default group's, its ranks are global ranks: what get_rank() says is what a root is named by.
    table[dense] = {rank: rank for rank in range(len(fabric.alive))}
    c10d._update_default_pg(dense)
    nominal = parallel_state.get_data_parallel_rank()
    parallel_state.set_data_parallel_rank(parallel_state.get_data_parallel_group(with_context_parallel=True).rank())
    try:
        yield
    finally:
        parallel_state.set_data_parallel_rank(nominal)
        c10d._update_default_pg(fabric.world)
        table[dense] = numbered
