"""Megatron's modules for one position of a tensor-parallel group of any size.

Megatron divides heads, query groups, MLP columns and vocabulary evenly by the size of the group. A module with an
uneven share is therefore built for a group of one, from a copy of the configuration that has the local sizes. Then
:meth:`TensorPlace.settle` makes it a member of its cell: it sets the real group, the flags of linear layers that
depend on the group's size, and the range of the vocabulary. Attention keeps its group size of one, since its local
heads have all query groups that they need.

Experts of a layer have the parts of the rank's crew. Where ranks share no experts, each rank of the cell has a part of
every one, and the ranks exchange tokens as a crew (:mod:`crew_dispatcher`).

With the launch's size Megatron's own division is used. Modules may be built before the cell's group has its members:
only :meth:`TensorPlace.settle` names the real group, and it runs when the cell computes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding

from megatron.elastic.config import ConfigError
from megatron.elastic.engine.compute.dropout import Section, Split
from megatron.elastic.engine.compute.model_interface import Crew
from megatron.elastic.mcore.model.dropout import Slices
from megatron.elastic.mcore.model.expert_homes import deal_experts
from megatron.elastic.mcore.model.layer_specs import of_many_shapes
from megatron.elastic.mcore.model.prediction import predicts
from megatron.elastic.mcore.model.tensor_cut import Sizes, TensorShare, share_of
from megatron.elastic.mcore.parallel_state.stage import GroupStandIn
from megatron.elastic.state.coverage import Position

__all__ = ["TensorPlace", "only_even"]


def only_even(config: Any) -> str:
    """Return why a model with this configuration cannot be cut unevenly; empty if it can."""
    if getattr(config, "multi_latent_attention", False):
        return "latent attention has no uneven tensor-parallel cut"
    if of_many_shapes(config):
        return "layers of different shapes have no uneven tensor-parallel cut"
    if predicts(config):
        return "layers that predict further tokens have no uneven tensor-parallel cut"
    if config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te":
        return "this cross entropy needs equal parts of the vocabulary: --cross-entropy-fusion-impl native"
    return ""


@dataclass(frozen=True)
class TensorPlace:
    """A rank's place in its cell: position, the cell's group, and the model's sizes.

    Raises ``ValueError`` if so many ranks cannot share the model.
    """

    position: Position
    group: dist.ProcessGroup
    sizes: Sizes
    rank: int = 0
    crew: Crew | None = None
    """The ranks with which ``rank`` exchanges tokens, in a model with experts."""
    launched: bool = False
    """True if position and group are those of the launch: only the crew is another one."""

    def __post_init__(self) -> None:
        _ = self.share

    @cached_property
    def share(self) -> TensorShare:
        """The part of the model that this position computes."""
        return share_of(self.sizes, self.position)

    @property
    def even(self) -> bool:
        """True if the cell has the launch's size: Megatron's own division is used."""
        return self.position.count == self.sizes.tensor

    @property
    def slices(self) -> Slices:
        """The slices of activations in which dropout draws this position's masks."""
        index, count = self.position.index, self.position.count
        heads = Split(1, index, count) if self.even else Section(1, self.share.heads[0], self.sizes.heads)
        return Slices(heads, Split(0, index, count) if self.share.sequence_parallel else None)

    def cell_config(self, config: Any) -> Any:
        """Return a copy of the model's configuration with the size of the cell."""
        mine = copy.copy(config)
        mine.tensor_model_parallel_size = self.position.count
        mine.sequence_parallel = self.share.sequence_parallel
        mine.distribute_saved_activations = False  # Megatron gathers them in the launch's group, in equal parts
        return mine

    def layer_config(self, config: Any) -> Any:
        """Return a copy of the model's configuration from which Megatron builds a layer of this position.

        Raises ``ConfigError`` for layers that cannot be dealt unevenly.
        """
        mine = self.cell_config(config)
        if self.even:
            return mine
        reason = only_even(config)
        if reason:
            raise ConfigError(reason)
        share = self.share
        mine.num_attention_heads = share.heads[1] - share.heads[0]
        mine.num_query_groups = share.groups[1] - share.groups[0]
        mine.ffn_hidden_size = share.columns[1] - share.columns[0]
        if self.sizes.shared_columns:
            mine.moe_shared_expert_intermediate_size = share.shared[1] - share.shared[0]
        if self._deals_columns_of_experts:
            mine.moe_ffn_hidden_size = share.expert[1] - share.expert[0]
        return mine

    @property
    def _deals_columns_of_experts(self) -> bool:
        """True if the columns of each expert are dealt over the cell, not by Megatron over equal parts."""
        return not self.even and self.sizes.expert_columns > 0 and self.sizes.experts == 0

    @property
    def vocabulary(self) -> int:
        """The vocabulary size from which Megatron builds an embedding or output layer of this position."""
        first, stop = self.share.vocabulary
        return self.sizes.vocabulary if self.even else stop - first

    def groups(self, collection: Any) -> Any:
        """Return a copy of a collection of process groups with the cell's tensor-parallel group."""
        mine = copy.copy(collection)
        mine.tp = self.group
        return mine

    def building_groups(self, collection: Any) -> Any:
        """Return the collection with which Megatron builds a module of this position."""
        mine = self.groups(collection)
        mine.tp = self._stand_in
        if self.crew is not None:
            part = self.crew.part_of(self.rank)
            mine.ep = GroupStandIn(0, self.sizes.expert_homes)
            mine.expt_tp = (
                GroupStandIn(0, 1) if self._deals_columns_of_experts else GroupStandIn(part.index, part.count)
            )
        return mine

    def deal_experts(self, layer: torch.nn.Module, building: Any) -> None:
        """Give a layer that was just built, with the groups ``building``, the experts of this place."""
        if self.crew is not None:
            deal_experts(layer, self.crew.experts_of(self.rank), building)

    @cached_property
    def _stand_in(self) -> GroupStandIn:
        """The group from which Megatron divides; not the real one, which may not have its members yet."""
        return GroupStandIn(self.position.index, self.position.count) if self.even else GroupStandIn(0, 1)

    def settle(self, built: torch.nn.Module) -> None:
        """Make a built module a member of its cell (module docstring).

        Raises ``ConfigError`` for modules of Transformer Engine, which keep the group in places of their own.
        """
        collection: Any = None
        for module in built.modules():
            if "transformer_engine" in type(module).__module__:
                kind = type(module).__name__
                raise ConfigError(f"{kind} cannot take another place in a cell: use --transformer-impl local")
            for name, value in list(vars(module).items()):
                if value is self._stand_in:
                    setattr(module, name, self.group)
                elif getattr(value, "tp", None) is self._stand_in:
                    collection = self.groups(value) if collection is None else collection
                    setattr(module, name, collection)
            if not self.even:
                self._settle_flags(module)

    def require_group(self) -> None:
        """Raise ``RuntimeError`` if the group does not have the position's rank and size (any more)."""
        if (self.group.rank(), self.group.size()) != (self.position.index, self.position.count):
            found = f"rank {self.group.rank()} of {self.group.size()}"
            raise RuntimeError(f"layers of {self.position} cannot run as {found} of a tensor-parallel group")

    def _settle_flags(self, module: Any) -> None:
        """Set what depends on the size of the group, or on the place in it."""
        parallel = self.share.sequence_parallel
        if getattr(module, "is_expert", False):
            module.explicit_expert_comm = True  # the dispatcher gathers and sums, as where Megatron cuts experts
            return
        if isinstance(module, ColumnParallelLinear):
            if module.gather_output:
                raise ConfigError("outputs of uneven sizes cannot be gathered: build the model with parallel_output")
            module.sequence_parallel = parallel
            module.allreduce_dgrad = self.position.count > 1 and not parallel and not module.disable_grad_reduce
        if isinstance(module, VocabParallelEmbedding):
            module.vocab_start_index, module.vocab_end_index = self.share.vocabulary
            module.num_embeddings = self.sizes.vocabulary
