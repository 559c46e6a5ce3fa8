"""Megatron's GPT with experts in cells of other sizes than at launch: losses and gradients beside those of the launch.

    python tests/unit/mcore/routed_layers.py OUT.json

Four ranks are in one stage. Each case first runs as launched, then in the cells and crews that the engine assigns to
other sizes, and as launched again. Each cell computes the same batch, with dropout 0.1 at every site. Parameters are
read by overlaps from the shards of the launch, and gradients are added by overlaps into them. Written for
``test_routed_layers.py``; ranks are forked after one import.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.unit.mcore.context_layers import ContextCell
from tests.unit.mcore.tensor_layers import COLUMNS, DROPOUT, LAYERS, ROWS, UNITS, Key, compared, min_of
from tests.unit.small_gpt import VOCABULARY, answers_of, gpt_config

# isort: split

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron.elastic.control.requests import ParallelSizes
from megatron.elastic.engine.compute.model_interface import CellPlace, UnitParameter
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.shape import GridShape, chunks_of
from megatron.elastic.mcore.model import vocabulary_range
from megatron.elastic.mcore.model.context_parallel import ContextParallel
from megatron.elastic.mcore.model.dropout import key_dropout
from megatron.elastic.mcore.model.gpt import GptInterface
from megatron.elastic.mcore.model.param_groups import GroupKeys
from megatron.elastic.mcore.patching.patches import Patch, apply
from megatron.elastic.plan.model import Grid
from megatron.elastic.state.coverage import Overlap, add, common_shard

WORLD, EXPERTS, LENGTH, OWN_COLUMNS = 4, 4, 16, 14
"""``OWN_COLUMNS``: hidden size of an expert."""

Sizes = tuple[int, int, int]
"""Tensor-, context- and expert-parallel size."""


@dataclass(frozen=True)
class Case:
    """One model and launch, and the sizes to which it goes."""

    tensor_parallel: int
    homes: int
    """Expert-parallel size of the launch."""
    cut: int
    """Number of ranks with a part of each expert at launch."""
    to: tuple[Sizes, ...]
    shared: int | None = None
    """Hidden size of a shared expert."""
    gate: bool = False
    gated: bool = False
    per_token: bool = False
    jitter: float | None = None
    recompute: str = "no"
    split: bool = False
    tied: bool = False
    bf16: bool = False
    masked: bool = False
    length: int = LENGTH

    @property
    def sequence_parallel(self) -> bool:
        return self.tensor_parallel > 1


CASES = (
    Case(
        1, 2, 1, ((2, 1, 2), (4, 1, 2), (1, 2, 2), (2, 2, 4), (1, 1, 4)), shared=22, gate=True, gated=True, jitter=0.1
    ),
    Case(2, 2, 2, ((1, 1, 2), (2, 1, 1), (1, 2, 2), (2, 2, 2), (1, 4, 1)), shared=22, gated=True, per_token=True),
    Case(
        2, 2, 1, ((1, 1, 4), (2, 1, 2), (4, 1, 4), (2, 2, 1)), shared=22, gate=True, recompute="selective", split=True
    ),
    Case(4, 2, 2, ((1, 1, 2), (2, 1, 2), (1, 2, 1)), gated=True, tied=True),
    Case(1, 1, 1, ((2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1)), shared=22, gate=True, gated=True, tied=True),
    Case(2, 1, 2, ((1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1)), shared=22, per_token=True, recompute="full"),
)
"""Four ranks have unequal numbers of columns of a shared expert, and of one that ranks do not share."""


class RoutedCell(ContextCell):
    """A rank's model in any cell of the sizes of a case."""

    def __init__(self, case: Case, interface: GptInterface, topology: LaunchTopology) -> None:
        super().__init__(case, interface)  # type: ignore[arg-type]
        self.topology = topology
        self.place = CellPlace((), 0)

    def hold(self, units: Any, place: CellPlace) -> None:
        self.place = place
        super().hold(units, place)

    def items(self) -> list[tuple[int, UnitParameter, tuple[Overlap, ...]]]:
        """As in any cell; an expert that ranks share has shards behind the unit's."""
        found = []
        for unit, item, overlaps in super().items():
            if item.spec.expert is not None and item.overlaps is None:
                shard = self.topology.expert_shard(item.spec.expert, self.place.index)
                overlaps = (Overlap(shard, overlaps[0].local, overlaps[0].remote),)
            found.append((unit, item, overlaps))
        return found

    def contributions(self, position: Any) -> dict[Key, torch.Tensor]:
        """This rank's contributions to the gradients of the launch's shards that it computes a part of."""
        views: dict[int, list[torch.Tensor]] = {unit: [] for unit in self.interface.held_units()}
        for unit, item, _ in self.items():
            gradient = item.parameter.grad
            views[unit].append(torch.zeros_like(item.parameter) if gradient is None else gradient.float())
        self.interface.finish_gradients(views)
        flat = [view for unit in self.interface.held_units() for view in views[unit]]
        found: dict[Key, torch.Tensor] = {}
        for (unit, item, overlaps), view in zip(self.items(), flat, strict=True):
            if not item.spec.sharded and position.index:
                continue
            whole = {overlap.shard: torch.zeros(item.spec.shape) for overlap in overlaps}
            add(overlaps, view, whole.__getitem__)
            found |= {(unit, shard, item.spec.name): part for shard, part in whole.items()}
        return found

    def of_all_cells(self, alone: Any) -> dict[str, Any]:
        """The loss of the batch and the mean gradient over the cells of the world, which all compute it."""
        self.interface.weigh_layer_losses(1.0)
        found = self.run(self.place.position, alone)
        everyone: list[Any] = [None] * WORLD
        dist.all_gather_object(everyone, found["gradients"])
        cells = WORLD // len(self.place.ranks)
        keys = sorted({key for one in everyone for key in one})
        sums = {key: sum(one[key] for one in everyone if key in one) / cells for key in keys}
        return {"loss": self.whole[0], "gradients": sums}


def launched(case: Case, context: ContextParallel, group_of: Callable[[tuple[int, ...]], Any]) -> GptInterface:
    """The interface of this rank's whole model, as Megatron built it."""
    config = gpt_config(
        case,
        LAYERS,
        DROPOUT,
        None if case.recompute == "no" else case.recompute,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=COLUMNS,
        gated_linear_unit=case.gated,
        add_bias_linear=False,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_ffn_hidden_size=OWN_COLUMNS,
        moe_shared_expert_intermediate_size=case.shared,
        moe_shared_expert_gate=case.gate,
        moe_token_dispatcher_type="alltoall",
        moe_aux_loss_coeff=0.05,
        moe_z_loss_coeff=0.01,
        moe_input_jitter_eps=case.jitter,
        calculate_per_token_loss=case.per_token,
        expert_model_parallel_size=case.homes,
        expert_tensor_parallel_size=case.cut,
    )
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    model: Any = GPTModel(
        config,
        spec,
        VOCABULARY,
        case.length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=case.tied,
    )
    key_dropout(model, parallel_state.get_tensor_model_parallel_rank())
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    args = Namespace(
        num_layers=LAYERS,
        seq_length=case.length,
        micro_batch_size=ROWS,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        transformer_impl="local",
    )
    keys = GroupKeys(OptimizerConfig(lr=1e-3), None)
    return GptInterface(
        [model],
        args,
        keys,
        reads_data=True,
        tensor_group=group_of,
        crew_group=group_of,
        context=context,
        context_group=group_of,
    )


def assignment(topology: LaunchTopology, sizes: Sizes) -> Assignment:
    """Cells of adjacent ranks; tensor-parallel pairs of a launch with pairs have other ranks than at launch."""
    tensor, context, experts = sizes
    size = tensor * context
    order = (0, 2, 1, 3) if size == tensor == topology.tensor == 2 else range(WORLD)
    cells = tuple(tuple(order[first : first + size]) for first in range(0, WORLD, size))
    wanted = ParallelSizes(tensor, 1, WORLD // size, context, experts)
    return Assignment.regular(topology, GridShape(wanted, cells, chunks_of(topology, 1)))


def compute(case: Case) -> dict[str, Any]:
    """The launch's loss, and the comparison with it of each of the sizes, and of the launch again."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        case.tensor_parallel, expert_model_parallel_size=case.homes, expert_tensor_parallel_size=case.cut
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    topology = LaunchTopology(
        case.tensor_parallel,
        1,
        WORLD // case.tensor_parallel,
        ((0, UNITS),),
        Grid(WORLD * ROWS, ROWS, WORLD // case.tensor_parallel),
        tied_unit=UNITS if case.tied else None,
        experts=EXPERTS if case.homes > 1 else 0,
        expert_homes=case.homes,
        expert_parts=case.cut if case.homes > 1 else 1,
    )
    rank, at_launch = dist.get_rank(), Assignment.at_launch(topology)
    all_sizes = {sizes: assignment(topology, sizes) for sizes in case.to}
    places = [one.place(r) for one in (at_launch, *all_sizes.values()) for r in range(WORLD)]
    named: set[tuple[int, ...]] = {(r,) for r in range(WORLD)}
    for place in places:
        assert place is not None
        named |= {place.ranks, place.tensor_ranks, place.context_ranks}
        named |= {place.crew.ranks} if place.crew is not None else set()
    groups = {ranks: dist.new_group(ranks) for ranks in sorted(named)}
    context = ContextParallel()
    rows = (*context.rows(), *vocabulary_range.rows())
    apply([Patch(symbol, reason, make) for symbol, reason, make in rows])
    with torch.random.fork_rng(devices=[]):
        cell = RoutedCell(case, launched(case, context, groups.__getitem__), topology)
    units = range(UNITS + case.tied)

    def run(where: Assignment) -> dict[str, Any]:
        place = where.place(rank)
        assert place is not None
        cell.hold(units, place)
        return cell.of_all_cells(groups[rank,])

    launch = run(at_launch)
    found: dict[str, Any] = {"launch": launch["loss"], "smallest": min_of(launch["gradients"].values()), "sizes": {}}
    for sizes, where in all_sizes.items():
        found["sizes"][str(sizes)] = compared(run(where), launch)
        found["sizes"][str(sizes)]["covered"] = covered(cell, where, rank)
    found["again"] = compared(run(at_launch), launch)
    return found


def covered(cell: RoutedCell, where: Assignment, rank: int) -> bool:
    """Whether the shards that overlaps name are among those that the engine says this rank holds."""
    spaces = set(where.held_by(rank, cell.interface.covered).spaces)
    common = common_shard(cell.case.tensor_parallel)
    named = {
        (unit, overlap.shard if item.spec.sharded else common)
        for unit, item, overlaps in cell.items()
        for overlap in overlaps
    }
    return named <= spaces


if __name__ == "__main__":
    answers = [{"case": asdict(case), "ranks": answers_of(case, compute, WORLD)} for case in CASES]
    Path(sys.argv[1]).write_text(json.dumps(answers))
