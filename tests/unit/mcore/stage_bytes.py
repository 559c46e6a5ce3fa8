"""The memory that stages of Megatron's GPT really hold: activations of a micro-batch, parameters and gradients, state.

    python tests/unit/mcore/stage_bytes.py OUT.json

What autograd saves in a piece's forward is counted by the storages behind it, each once, weights apart: that is what
lives until its backward. Written for ``test_memory_model.py``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import recut_pipeline as pipeline  # type: ignore[import-not-found]  # beside this script
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from recut_pipeline import Case, Pipeline
from torch.autograd.graph import saved_tensors_hooks

from megatron.elastic.engine.compute.dropout import DropoutKey, dropout_scope
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.repartition import unmeasured_profile
from megatron.elastic.plan.model import Grid, Piece
from megatron.elastic.plan.search.partition import Model

CUTS = ((0, 3, 6), (0, 5, 6))
CASES: tuple[tuple[Case, dict[str, Any]], ...] = (
    (Case("dropout"), {}),
    (Case("recomputed", recompute=True), {}),
    (Case("gated, grouped queries", tied=False), {"gated_linear_unit": True, "num_query_groups": 2}),
    (Case("no dropout"), {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    (Case("bf16", bf16=True), {}),
)
SIZES = {"hidden_size": 64, "ffn_hidden_size": 256, "kv_channels": 16}
ROWS = 4


def measured(cells: Pipeline, segment: tuple[int, int, int], rows: int) -> int:
    """Bytes that the forward of ``rows`` rows keeps for the backward."""
    first, end, cell = segment
    tokens = torch.randint(0, pipeline.VOCABULARY, (rows, pipeline.LENGTH + 1))
    positions = torch.arange(pipeline.LENGTH).unsqueeze(0).expand(rows, -1)
    mask = torch.ones(pipeline.LENGTH, pipeline.LENGTH).triu(1).bool().expand(rows, 1, -1, -1)

    def step(_: Any, model: Any) -> Any:
        output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
        return output, lambda losses: (losses.float().sum(), torch.tensor(losses.numel()), {})

    size, dtype = cells.ports[cell].boundary(rows)
    source = None if first == 0 else torch.randn(size, dtype=dtype).requires_grad_(True)
    piece = Piece(0, cell, first, end, tuple(range(rows)))
    place = (int(first > 0), 1 + int(first > 0) + int(end < pipeline.UNITS))
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with dropout_scope(DropoutKey(7, 5, piece.rows)), saved_tensors_hooks(pack, lambda tensor: tensor):
        output = cells.ports[cell].forward(step, piece, place, source, iter(()))
    if isinstance(output, torch.Tensor):
        pack(output)  # the next stage's gradient comes back to it
    weights = {parameter.untyped_storage().data_ptr() for parameter in cells.ports[cell].chunks.parameters()}
    weights.add(cells.arenas[cell].parameters.untyped_storage().data_ptr())
    return sum(size for where, size in kept.items() if where not in weights)


def answers(case: Case) -> Iterator[dict[str, Any]]:
    """Per cut and stage: bytes counted, and bytes by the planner's model."""
    cells = Pipeline(case)
    tied = pipeline.UNITS if case.tied else None
    nominal = LaunchTopology(1, 2, 1, ((0, 3), (3, pipeline.UNITS)), Grid(ROWS, ROWS, 1), tied)
    size, dtype = cells.ports[0].boundary(1)
    costs = unmeasured_profile(
        nominal,
        cells.layouts,
        size[0],
        size.numel() * dtype.itemsize,
        cells.arenas[0].dtype.itemsize,
        cells.ports[0].activation_bytes,
        state_bytes=0,
    )
    model = Model(costs, 1, 1, () if tied is None else ((0, pipeline.UNITS - 1),))
    for cuts in CUTS:
        cells.cut(cuts)
        for segment in cells.segments:
            first, end, cell = segment
            arena, fixed = cells.arenas[cell], model.stage_bytes(first, end, 0)
            yield {
                "stage": f"{cuts} [{first}, {end})",
                "activations": measured(cells, segment, ROWS),
                "activations predicted": model.stage_bytes(first, end, ROWS) - fixed,
                "parameters and gradients": sum(
                    t.numel() * t.element_size() for t in (arena.parameters, arena.gradients)
                ),
                "parameters and gradients predicted": fixed,
            }


def main() -> None:
    torch.manual_seed(1)
    pipeline.LENGTH, pipeline.VOCABULARY = 64, 512
    base, found = pipeline.config_of, {}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(f"{folder}/store", 1))
        parallel_state.initialize_model_parallel(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        for case, changes in CASES:
            pipeline.config_of = lambda of, changes=changes: replace(base(of), **SIZES, **changes)
            found[case.name] = list(answers(case))
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
