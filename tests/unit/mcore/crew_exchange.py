"""Four ranks with parts of experts exchange tokens; each compares results with those of whole experts in one process.

    python tests/unit/mcore/crew_exchange.py OUT.json

Written for ``test_crew_dispatcher.py``: this import redirects CUDA for the whole process.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.unit.small_gpt import answers_of

# isort: split

import torch
import torch.distributed as dist

from megatron.elastic.engine.compute.model_interface import Crew
from megatron.elastic.mcore.model.crew_dispatcher import CrewDispatcher

WORLD, EXPERTS, HIDDEN, WIDTH = 4, 4, 6, 8
RANKS = tuple(range(WORLD))


@dataclass(frozen=True)
class Case:
    """Homes of experts; ``parts``: ranks with a part of each expert, adjacent ones; ``tokens`` of each rank."""

    name: str
    homes: tuple[tuple[int, ...], ...]
    parts: int = 1
    tokens: tuple[int, ...] = (5, 5, 5, 5)
    tensor_parallel: int = 1
    sequence_parallel: bool = False


CASES = (
    Case("two parts of each", ((0, 1), (0, 1), (2, 3), (2, 3)), 2, (4, 6, 5, 5)),
    Case("two parts, uneven homes", ((0, 1, 3), (0, 1, 3), (2,), (2,)), 2, (4, 6, 0, 0)),
    Case("replicas", ((0, 1), (1, 2), (0, 1, 3), (1,)), 1, (5, 7, 0, 5)),
    Case("replicas in two parts", ((0, 1, 3), (0, 1, 3), (1, 2, 3), (1, 2, 3)), 2, (4, 6, 0, 5)),
)


def _expert(x: torch.Tensor, probs: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """An MLP of columns and rows; its probability multiplies what is between them, as in Megatron."""
    return (torch.nn.functional.gelu(x @ weights[0].t()) * probs.unsqueeze(-1)) @ weights[1].t()


def compute(case: Case) -> dict[str, float]:
    """Largest deviations of output, input gradient, gradient of probabilities, and gradient of weights."""
    rank, draw = dist.get_rank(), torch.Generator().manual_seed(3)
    inputs = [torch.randn(count, HIDDEN, generator=draw, dtype=torch.float64) for count in case.tokens]
    scores = [torch.rand(count, EXPERTS, generator=draw, dtype=torch.float64) for count in case.tokens]
    weights = [
        (
            torch.randn(WIDTH, HIDDEN, generator=draw, dtype=torch.float64),
            torch.randn(HIDDEN, WIDTH, generator=draw, dtype=torch.float64),
        )
        for _ in range(EXPERTS)
    ]
    each = WIDTH // case.parts
    mine = slice((rank % case.parts) * each, (rank % case.parts + 1) * each)
    cut = {expert: (weights[expert][0][mine], weights[expert][1][:, mine]) for expert in case.homes[rank]}
    local = {expert: tuple(part.clone().requires_grad_() for part in both) for expert, both in cut.items()}
    x, probs = inputs[rank].clone().requires_grad_(), scores[rank].clone().requires_grad_()
    output = _dispatched(case, rank, x, probs, local)
    (output * _weights_of(output)).sum().backward()
    return _deviations(case, rank, (inputs, scores, weights), (x, probs, output, local), mine)


def _weights_of(output: torch.Tensor) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + output.numel(), dtype=output.dtype).view(output.shape)


def _routed(scores: torch.Tensor) -> torch.Tensor:
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter(1, scores.topk(2, dim=1).indices, True)


def _dispatched(case: Case, rank: int, x: torch.Tensor, probs: torch.Tensor, local: dict[int, Any]) -> torch.Tensor:
    world = dist.group.WORLD
    assert world is not None
    dispatcher = CrewDispatcher(Crew(RANKS, case.homes, case.parts), rank, lambda ranks: world)
    rows, chosen = dispatcher.dispatch_preprocess(x, _routed(probs.detach()), probs)
    rows, counts, chosen = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, chosen))
    parts = zip(case.homes[rank], rows.split(counts.tolist()), chosen.split(counts.tolist()), strict=True)
    computed = [_expert(some, of, local[expert]) for expert, some, of in parts]
    whole = torch.cat(computed) if computed else rows
    return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(whole)))


def _deviations(case: Case, rank: int, data: Any, found: Any, mine: slice) -> dict[str, float]:
    """Compare with every expert applied to every token of all ranks, in one process."""
    inputs, scores, weights = data
    x, probs, output, local = found
    leaves = [(one.clone().requires_grad_(), two.clone().requires_grad_()) for one, two in weights]
    outputs = []
    for tokens, score in zip(inputs, scores, strict=True):
        tokens.requires_grad_(), score.requires_grad_()
        chosen = torch.where(_routed(score.detach()), score, torch.zeros_like(score))
        each = [_expert(tokens, chosen[:, expert], leaves[expert]) for expert in range(EXPERTS)]
        outputs.append(torch.stack(each).sum(dim=0))
    torch.stack([(one * _weights_of(one)).sum() for one in outputs]).sum().backward()
    pairs = []
    for expert, both in enumerate(leaves):
        for number, leaf in enumerate(both):
            gradient, part = torch.zeros_like(leaf), (mine, slice(None)) if number == 0 else (slice(None), mine)
            if expert in local and local[expert][number].grad is not None:
                gradient[part] = local[expert][number].grad
            dist.all_reduce(gradient)  # parts side by side, and the sum over replicas
            pairs.append((gradient, leaf.grad))
    return {
        "output": _largest(output, outputs[rank]),
        "input": _largest(x.grad, inputs[rank].grad),
        "probabilities": _largest(probs.grad, scores[rank].grad),
        "weights": max((_largest(one, other) for one, other in pairs), default=0.0),
    }


def _largest(one: Any, other: Any) -> float:
    return float((one - other).abs().max()) if one is not None and one.numel() else 0.0


def main(out: str) -> None:
    Path(out).write_text(json.dumps([[case.name, answers_of(case, compute, WORLD)] for case in CASES]))


if __name__ == "__main__":
    main(sys.argv[1])
