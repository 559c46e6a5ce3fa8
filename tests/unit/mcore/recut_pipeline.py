"""Megatron's GPT cut into pipelines in several ways, units changing place in between: losses and gradients.

    python tests/unit/mcore/recut_pipeline.py OUT.json

One process hosts every cell of a pipeline (one process a tensor-parallel rank). Each case starts at the
launch's cut and goes through other cuts and back, with dropout 0.1 at every site. Written for
``test_surgery.py``; ranks are forked after one import.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.unit.small_gpt import LENGTH, VOCABULARY, answers_of, gpt_config

# isort: split

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.elastic.engine.compute.buffers import Arena, HeldPart
from megatron.elastic.engine.compute.dropout import DropoutKey, dropout_scope
from megatron.elastic.engine.compute.model_interface import LossOutput
from megatron.elastic.mcore.model.dropout import key_dropout
from megatron.elastic.mcore.model.gpt import GptInterface
from megatron.elastic.mcore.model.param_groups import GroupKeys
from megatron.elastic.mcore.parallel_state.stage import GroupStandIn, as_stage
from megatron.elastic.plan.model import Piece
from megatron.elastic.state.layout import UnitLayout

LAYERS, SAMPLES, DROPOUT = 4, 4, 0.1
UNITS = LAYERS + 2
NOMINAL = (0, 3, UNITS)
STAGES = len(NOMINAL) - 1
INTERLEAVED = (0, 2, 3, 4, UNITS)
"""Megatron's cut with two model chunks a stage: they take turns."""
SHAPES = json.dumps(
    {
        "block_configs": [
            {"attention": {"num_query_groups": 2}, "mlp": {"ffn_hidden_size": 64}},
            {"attention": {"num_query_groups": None, "no_op": True}, "mlp": {"ffn_hidden_size": 96}},
            {"attention": {"num_query_groups": 4}, "mlp": {"ffn_hidden_size": None, "no_op": True}},
            {"attention": {"num_query_groups": None, "replace_with_linear": True}, "mlp": {"ffn_hidden_size": 128}},
        ]
    }
)
"""Layers with other sizes, without attention, without an MLP, and with a linear layer instead of attention."""
CUTS: tuple[tuple[int, ...], ...] = ((0, 2, UNITS), (0, 5, UNITS), (0, UNITS), (0, 1, UNITS), NOMINAL)
"""The cuts that the cells go through: cell k holds units [cut k, cut k + 1); a cell beyond the end holds nothing."""


@dataclass(frozen=True)
class Case:
    """One model."""

    name: str
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    tied: bool = True
    recompute: bool = False
    bf16: bool = False
    interleaved: bool = False
    shapes: bool = False
    further: int = 0
    """Further tokens that are predicted."""

    @property
    def launch(self) -> list[tuple[int, int, int]]:
        """Segments (first unit, end unit, cell) of the launch."""
        cuts = INTERLEAVED if self.interleaved else NOMINAL
        return [(first, end, number % STAGES) for number, (first, end) in enumerate(pairwise(cuts))]


CASES = (
    Case("tied"),
    Case("untied, recomputed", tied=False, recompute=True),
    Case("bf16", bf16=True),
    Case("interleaved", interleaved=True),
    Case("interleaved, untied, recomputed, bf16", tied=False, recompute=True, bf16=True, interleaved=True),
    Case("layers of four shapes", shapes=True),
    Case("layers of four shapes, interleaved, recomputed", recompute=True, interleaved=True, shapes=True),
    Case("two further tokens", tied=False, further=2),
    Case("a further token, interleaved, bf16", tied=False, bf16=True, interleaved=True, further=1),
    Case("tp2", tensor_parallel=2),
    Case("tp2, sequence parallel, untied", tensor_parallel=2, sequence_parallel=True, tied=False),
)


def config_of(case: Case) -> TransformerConfig:
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    recompute = "full" if case.recompute else None
    chunks = {"virtual_pipeline_model_parallel_size": len(case.launch) // STAGES} if case.interleaved else {}
    more: dict[str, Any] = {"heterogeneous_layers_config_encoded_json": SHAPES} if case.shapes else {}
    more |= {"mtp_num_layers": case.further} if case.further else {}
    return gpt_config(case, LAYERS, DROPOUT, recompute, dtype, pipeline_model_parallel_size=STAGES, **chunks, **more)


def model_of(
    case: Case, config: TransformerConfig, units: tuple[int, int], stage: int, chunk: int | None, groups: Any
) -> Any:
    """The chunk of a stage that Megatron builds with ``units`` [first, end)."""
    spec: Any = get_gpt_layer_local_spec()
    if case.shapes:
        spec = get_gpt_heterogeneous_layer_spec(config, vp_stage=chunk, pp_rank=stage)
    last = get_gpt_mtp_block_spec(config, spec, False, vp_stage=chunk, pp_rank=stage) if case.further else None
    return GPTModel(
        config,
        spec,
        VOCABULARY,
        LENGTH,
        pre_process=units[0] == 0,
        post_process=units[1] == UNITS,
        position_embedding_type="rope" if case.further else "learned_absolute",
        share_embeddings_and_output_weights=case.tied,
        mtp_block_spec=last,
        pg_collection=groups,
        vp_stage=chunk,
    )


def port_of(case: Case, stage: int) -> GptInterface:
    """The port of the cell that holds stage ``stage`` at launch."""
    config = config_of(case)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.pp = GroupStandIn(stage, STAGES)
    chunks = []
    for number, (first, end, _) in enumerate(case.launch[stage::STAGES]):
        chunk = number if case.interleaved else None
        with as_stage(stage, STAGES, config.virtual_pipeline_model_parallel_size):
            model = model_of(case, config, (first, end), stage, chunk, groups)
        key_dropout(model, parallel_state.get_tensor_model_parallel_rank())
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(Float16Module(config, model) if case.bf16 else model)
    args = Namespace(
        num_layers=LAYERS,
        seq_length=LENGTH,
        micro_batch_size=SAMPLES,
        pipeline_model_parallel_size=STAGES,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        transformer_impl="local",
    )
    return GptInterface(chunks, args, GroupKeys(OptimizerConfig(lr=1e-3), None), reads_data=True)


def _held(units: Collection[int]) -> HeldPart:
    """The part that a cell holds; all parameters of a unit are in one space."""
    return HeldPart(tuple(sorted(units)), None, tuple((unit, 0) for unit in units))


class Pipeline:
    """Cells side by side in one process; parameters of units that change place are handed over by value."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.ports = [port_of(case, stage) for stage in range(STAGES)]
        self.tied = self.ports[0].tied_unit
        specs = {
            u: [i.spec for i in interface.unit_parameters(u)]
            for interface in self.ports
            for u in interface.held_units()
        }
        layouts = {unit: UnitLayout.build(unit, 0, tuple(found), 1 << 18) for unit, found in specs.items()}
        self.layouts = {(unit, 0): layout for unit, layout in layouts.items()}
        self.arenas = [Arena(interface, self.layouts, _held(interface.held_units())) for interface in self.ports]
        generator = torch.Generator().manual_seed(3 + parallel_state.get_tensor_model_parallel_rank())
        shared = torch.Generator().manual_seed(2)
        self.values = {}
        for unit, layout in sorted(layouts.items()):
            flat = torch.empty(layout.numel)
            for slot in layout.slots:
                source = generator if slot.spec.sharded else shared
                part = 0.2 * torch.randn(slot.spec.numel, generator=source)
                flat[slot.start : slot.start + slot.spec.numel] = part + ("norm.weight" in slot.spec.name)
            self.values[unit] = flat
        self.fill()

    def fill(self) -> None:
        for arena in self.arenas:
            for (unit, _), where in arena.slices.items():
                arena.parameters[where.start : where.stop].copy_(self.values[unit])

    def cut(self, cuts: Sequence[int], ahead: bool = False) -> None:
        """Cell k holds units [cuts[k], cuts[k + 1]) from now on; ``ahead``: what it lacks is built before."""
        self.hold([(a, b, number) for number, (a, b) in enumerate(pairwise(cuts))], ahead)

    def hold(self, segments: list[tuple[int, int, int]], ahead: bool = False) -> None:
        """Cells hold what these (first unit, end unit, cell) ask of them."""
        for number, arena in enumerate(self.arenas):
            units = {unit for first, end, cell in segments if cell == number for unit in range(first, end)}
            if self.tied is not None and units & {0, UNITS - 1}:
                units.add(self.tied)
            if ahead:
                arena.prepare(_held(units))
            arena.hold(_held(units))
        self.fill()
        self.segments = segments

    def run(self, segments: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
        """Forward and backward of the batch through (first, end, cell); loss, norm of each unit's gradient."""
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
        positions = torch.arange(LENGTH).unsqueeze(0).expand(SAMPLES, -1)
        mask = torch.ones(LENGTH, LENGTH).triu(1).bool().expand(SAMPLES, 1, -1, -1)

        def step(_: Any, model: Any) -> Any:
            output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
            return output, lambda losses: (losses.float().sum(), torch.tensor(losses.numel()), {})

        for arena in self.arenas:
            arena.zero_gradients()
        kept: list[tuple[Any, torch.Tensor | None, Any]] = []
        at: torch.Tensor | None = None
        scope = DropoutKey(7, 5, tuple(range(SAMPLES)))
        for first, end, cell in segments:
            source = None if at is None else at.detach().requires_grad_(True)
            piece = Piece(0, cell, first, end, tuple(range(SAMPLES)))
            place = (int(first > 0), 1 + int(first > 0) + int(end < UNITS))
            with dropout_scope(scope):
                output = self.ports[cell].forward(step, piece, place, source, iter(()))
            at = None if isinstance(output, LossOutput) else output
            kept.append((output, source, cell))
        loss = kept[-1][0].loss
        gradient: torch.Tensor | None = None
        for output, source, _ in reversed(kept):
            with dropout_scope(scope):
                torch.autograd.backward(output.loss if isinstance(output, LossOutput) else output, gradient)
            gradient = None if source is None else source.grad
        for interface, arena in zip(self.ports, self.arenas, strict=True):
            interface.finish_gradients(arena.gradient_views())
        total: dict[int, torch.Tensor] = {}
        for arena in self.arenas:  # a tied weight's gradient is the sum over its holders
            for (unit, _), where in arena.slices.items():
                gradients = arena.gradients[where.start : where.stop]
                total[unit] = total.get(unit, 0) + gradients  # type: ignore[operator]
        return {"loss": float(loss), "grads": {unit: value.tolist() for unit, value in sorted(total.items())}}

    def sizes(self) -> list[int]:
        """Parameter elements that each cell's modules and arena really keep alive."""
        return [
            sum({p.data.untyped_storage().data_ptr(): p.data.untyped_storage().nbytes() for p in everything}.values())
            for everything in (
                [
                    *interface.chunks.parameters(),
                    *(i.parameter for u in interface.held_units() for i in interface.unit_parameters(u)),
                ]
                for interface in self.ports
            )
        ]


def compute(case: Case) -> list[dict[str, Any]]:
    """Nominal first, then each cut; the last but one entry runs one cell's units as several pieces."""
    pipeline = Pipeline(case)
    before = torch.get_rng_state()
    answers = [{"cut": "launch", **pipeline.run(case.launch), "bytes": pipeline.sizes()}]
    for number, cuts in enumerate(CUTS):
        pipeline.cut(cuts, ahead=number % 2 == 0)
        answers.append({"cut": str(cuts), **pipeline.run(pipeline.segments), "bytes": pipeline.sizes()})
        if cuts == (0, UNITS):
            finer = [(0, 2, 0), (2, 4, 0), (4, UNITS, 0)]
            answers.append({"cut": "pieces", **pipeline.run(finer), "bytes": pipeline.sizes()})
    pipeline.hold(case.launch)
    answers.append({"cut": "launch again", **pipeline.run(case.launch), "bytes": pipeline.sizes()})
    answers.append({"cut": "random state kept", "same": bool(torch.equal(before, torch.get_rng_state()))})
    return answers


if __name__ == "__main__":
    answers = [{"case": asdict(case), "ranks": answers_of(case, compute)} for case in CASES]
    Path(sys.argv[1]).write_text(json.dumps(answers))
