"""A layer with experts on the ranks of a crew, beside Megatron's layer with all experts on one rank.

    python tests/unit/mcore/crew_layers.py OUT.json

Written for ``test_crew.py``: this import redirects CUDA for the whole process.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.unit.small_gpt import VOCABULARY, answers_of, gpt_config

# isort: split

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import build_module

from megatron.elastic.engine.compute.model_interface import Crew
from megatron.elastic.mcore.model.expert_homes import deal_experts, expert_of, join_crew, launch_crew, sent_tokens
from megatron.elastic.mcore.model.ghost import GhostLayer, GhostPrediction
from megatron.elastic.mcore.model.prediction import build_prediction, prediction_spec

EXPERTS, TOP, LENGTH, ROWS, WIDTH = 4, 2, 6, 2, 32


@dataclass(frozen=True)
class Dealt:
    """``homes``: the experts of each rank; ``rows``: samples of each rank's micro-batch, 0 for a ghost."""

    homes: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    balance: float = 0.0
    """Coefficient of the losses that balance experts."""


CASES = {
    "even": Dealt(((0, 1), (2, 3)), (ROWS, ROWS)),
    "uneven": Dealt(((0, 1, 3), (2,)), (ROWS, ROWS)),
    "a ghost": Dealt(((1,), (0, 2, 3)), (ROWS, 0)),
    "a ghost, bf16": Dealt(((1,), (0, 2, 3)), (ROWS, 0), dtype=torch.bfloat16),
    "alone": Dealt(((0, 1, 2, 3),), (ROWS,)),
    "replicas": Dealt(((0, 1, 2), (1, 2, 3)), (ROWS, ROWS)),
    "replicas and a ghost": Dealt(((0, 1, 2), (1, 2, 3)), (0, ROWS)),
}


PARTS = Dealt(((0, 1), (2, 3)), (), balance=0.5)
"""Two ranks with a part of each sequence, of a model with losses that balance experts."""


def whole_layer(case: Dealt) -> Any:
    """Megatron's layer with all experts, the same on each rank."""
    config = gpt_config(
        Dealt((), ()),
        1,
        0.0,
        dtype=case.dtype,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP,
        moe_token_dispatcher_type="alltoall",
        moe_aux_loss_coeff=case.balance,
        moe_z_loss_coeff=case.balance or None,
        moe_ffn_hidden_size=16,
        add_bias_linear=False,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    return build_module(spec, config=config, layer_number=1)


def dealt_layer(whole: Any, case: Dealt, rank: int) -> Any:
    """The layer with this rank's experts only, with the same parameters."""
    crew = Crew(tuple(range(len(case.homes))), case.homes)
    layer, experts = whole_layer(case), crew.experts_of(rank)
    deal_experts(layer, experts, get_default_pg_collection())
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(values[expert_of(f".{name}", experts)[0][1:]])
    join_crew(layer, crew, rank, lambda ranks: dist.group.WORLD)  # type: ignore[arg-type, return-value]
    return layer


def micro_batch(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """[s, b, h] of one rank."""
    made = torch.Generator().manual_seed(7 + rank)
    return torch.randn(LENGTH, rows, WIDTH, generator=made).to(dtype).requires_grad_()


def apart(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Largest difference, relative to the largest element."""
    assert found is not None and expected is not None and found.shape == expected.shape
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def compute(case: Dealt) -> dict[str, float]:
    """Return how far output, input gradient and expert gradients are from those of the layer with all experts."""
    rank, whole = dist.get_rank(), whole_layer(case)
    layer = dealt_layer(whole, case, rank)
    mine = micro_batch(rank, case.rows[rank], case.dtype)
    if case.rows[rank]:
        output = layer(mine)[0]
    else:
        holder = torch.nn.Module()
        holder.mlp = layer
        output = GhostLayer(holder)(mine)[0]
    output.square().sum().backward()
    counted = sum(sent_tokens([layer])[1])
    differences: dict[str, float] = {"counted": abs(counted - TOP * LENGTH * case.rows[rank])}
    for other, rows in enumerate(case.rows):
        if not rows:
            continue
        theirs = micro_batch(other, rows, case.dtype)
        expected = whole(theirs)[0]
        expected.square().sum().backward()  # the gradients of experts add up over micro-batches
        if other == rank:
            differences |= {"output": apart(output, expected), "input": apart(mine.grad, theirs.grad)}
    return differences | of_experts(layer, whole, case, rank)


def of_experts(layer: Any, whole: Any, case: Dealt, rank: int) -> dict[str, float]:
    """Return how far the gradients of a rank's experts are from those of the layer with all of them.

    Those of replicas add up.
    """
    named = ((*expert_of(f".{name}", case.homes[rank]), parameter) for name, parameter in layer.named_parameters())
    mine = {name[1:]: parameter.grad for name, expert, parameter in named if expert is not None}
    found = dict[str, float]()
    for name, parameter in whole.named_parameters():
        if ".local_experts." in name:
            gradient = mine.get(name)
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            dist.all_reduce(gradient)
            if name in mine:
                found[f".{name}"] = apart(gradient, parameter.grad)
    return found


def compute_parts(case: Dealt) -> dict[str, float]:
    """Return the same for ranks that have a part of each sequence, and for the router, whose gradients add up."""
    rank, whole = dist.get_rank(), whole_layer(case)
    layer, everything = dealt_layer(whole, case, rank), micro_batch(0, ROWS, case.dtype)
    layer.router.tp_cp_group = dist.group.WORLD
    each = LENGTH // len(case.homes)
    positions = slice(rank * each, (rank + 1) * each)
    mine = everything.detach()[positions].clone().requires_grad_()
    output, expected = layer(mine)[0], whole(everything)[0]
    output.square().sum().backward()
    expected.square().sum().backward()
    router = layer.router.weight.grad
    dist.all_reduce(router)
    return {
        "output": apart(output, expected[positions]),
        "input": apart(mine.grad, everything.grad[positions]),  # type: ignore[index]
        "router": apart(router, whole.router.weight.grad),
        **of_experts(layer, whole, case, rank),
    }


FURTHER = Dealt(((1,), (0, 2, 3)), (ROWS, 0))
RECOMPUTED: dict[str, str | None] = {"further tokens": None, "further tokens, recomputed": "full"}


def predicting_layers(recompute: str | None) -> Any:
    """Megatron's layers that predict two further tokens, with all experts, the same on each rank."""
    config = gpt_config(
        FURTHER,
        1,
        0.0,
        recompute,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP,
        moe_token_dispatcher_type="alltoall",
        moe_aux_loss_coeff=0.0,
        moe_ffn_hidden_size=16,
        add_bias_linear=False,
        mtp_num_layers=2,
    )
    layer = get_gpt_layer_local_spec(num_experts=EXPERTS)
    return build_prediction(prediction_spec(config, layer, False), config, get_default_pg_collection())


def further(recompute: str | None) -> dict[str, float]:
    """Return how far a rank's experts of such layers are from those of one rank with all; the other has no rows."""
    torch.manual_seed(3)
    whole = predicting_layers(recompute)
    rank, crew = dist.get_rank(), Crew((0, 1), FURTHER.homes)
    mine, experts = predicting_layers(recompute), crew.experts_of(rank)
    deal_experts(mine, experts, get_default_pg_collection())
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in mine.named_parameters():
            parameter.copy_(values[expert_of(name, experts)[0]])
    join_crew(mine, crew, rank, lambda ranks: dist.group.WORLD)  # type: ignore[arg-type, return-value]
    table = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(5))
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool().expand(ROWS, 1, -1, -1)

    def through(layers: Any) -> torch.Tensor:
        hidden = micro_batch(0, ROWS, torch.float32)
        look_up = lambda input_ids, position_ids: table[input_ids].transpose(0, 1).contiguous()  # noqa: E731
        return layers(tokens, tokens, hidden, mask, embedding=look_up)

    expected = through(whole)
    expected.square().sum().backward()
    found = through(mine) if rank == 0 else GhostPrediction(mine)(micro_batch(1, 0, torch.float32))
    found.square().sum().backward()
    differences = {"output": apart(found, expected)} if rank == 0 else {}
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in mine.named_parameters():
        known, expert = expert_of(name, experts)
        if expert is not None:
            differences[known] = apart(parameter.grad, gradients[known])
    return differences


def names() -> dict[str, Any]:
    """Names of parameters on a rank that has experts 2 and 5, and the crews of two expert-parallel groups."""
    expert, router = "mlp.experts.local_experts.1.linear_fc1.weight", "mlp.router.weight"
    crews = [launch_crew(6, 3, 1, 4), launch_crew(4, 2, 2, 5)]
    named = [expert_of(f".{name}", (2, 5)) for name in (expert, router)]
    return {"names": named, "crews": [(crew.ranks, crew.experts) for crew in crews]}


if __name__ == "__main__":
    found: dict[str, Any] = {name: answers_of(case, compute, world=len(case.homes)) for name, case in CASES.items()}
    found["parts"] = answers_of(PARTS, compute_parts, world=len(PARTS.homes))
    for name, how in RECOMPUTED.items():
        found[name] = answers_of(FURTHER, lambda _, how=how: further(how), world=2)  # type: ignore[misc]
    Path(sys.argv[1]).write_text(json.dumps(found | {"names": names()}))
