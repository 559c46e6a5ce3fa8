"""The experts of Megatron's layers on a rank that has other ones than Megatron gave it, or others of its crew.

Megatron gives each rank of an expert-parallel group the same number of adjacent experts. Here a layer receives the
experts whose home this rank is, and a dispatcher that knows the homes (:class:`CrewDispatcher`). In a parameter's name
an expert has its number in the layer, not that on the rank, so it has the same name on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron.elastic.engine.compute.model_interface import Crew
from megatron.elastic.mcore.model.crew_dispatcher import CrewDispatcher, GroupOf
from megatron.elastic.mcore.model.layer_specs import without_references
from megatron.elastic.mcore.parallel_state.stage import GroupStandIn

__all__ = [
    "cell_crew",
    "deal_experts",
    "expert_of",
    "forget_sent_tokens",
    "is_expert",
    "join_crew",
    "launch_crew",
    "layers_with_experts",
    "number_experts",
    "route_over",
    "sent_tokens",
]

_LOCAL = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")
_EXPERTS = re.compile(r"(^|\.)mlp\.experts\.")


def launch_crew(experts: int, homes: int, parts: int, rank: int) -> Crew:
    """Return the crew of ``rank`` as Megatron deals it: ``homes`` sets of experts, each on ``parts`` adjacent ranks.

    It follows from the rank's number, not from Megatron's group: a rank beyond the launch has only its own cell there.
    """
    each, first = experts // homes, rank - rank % (homes * parts)
    blocks = [tuple(range(at * each, (at + 1) * each)) for at in range(homes) for _ in range(parts)]
    return Crew(tuple(range(first, first + homes * parts)), tuple(blocks), parts)


def cell_crew(experts: int, ranks: Sequence[int]) -> Crew:
    """Return the crew of a tensor-parallel group whose ranks have a part of every expert each."""
    return Crew(tuple(ranks), (tuple(range(experts)),) * len(ranks), len(ranks))


def number_experts(module: torch.nn.Module, crew: Crew, rank: int, parts: int) -> None:
    """Show the layers in ``module`` the groups of Megatron's in which ``rank`` has experts of its ``crew`` at launch.

    Checkpoints number experts, and their ``parts``, by rank and size of these groups, whichever members are left.
    """
    home, part = divmod(crew.ranks.index(rank), parts)
    groups = {"ep_group": GroupStandIn(home, len(crew.ranks) // parts), "tp_group": GroupStandIn(part, parts)}
    for layer in layers_with_experts(module):
        for inner in layer.experts.modules():
            for name in groups.keys() & vars(inner).keys():
                setattr(inner, name, groups[name])


def deal_experts(module: torch.nn.Module, experts: Sequence[int], groups: Any) -> None:
    """Give each layer in ``module`` these experts. ``groups``: the collection with which its modules are built."""
    for layer in layers_with_experts(module):
        if layer.num_local_experts != len(experts):
            config = without_references(layer.config)
            # Megatron gives its experts this width too, after a copy in depth.
            config.ffn_hidden_size = config.moe_ffn_hidden_size
            layer.experts = layer.submodules.experts(len(experts), config, pg_collection=groups)
            layer.num_local_experts = len(experts)
        layer.local_expert_indices = list(experts)


def join_crew(module: torch.nn.Module, crew: Crew, rank: int, group_of: GroupOf) -> None:
    """Make the layers in ``module`` exchange tokens with the ranks of ``crew``.

    A shared expert is computed beside, not inside, the exchange.
    """
    for layer in layers_with_experts(module):
        layer.token_dispatcher = CrewDispatcher(crew, rank, group_of)
        layer.shared_expert_overlap = False


def route_over(module: torch.nn.Module, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Make the routers in ``module`` balance tokens over these ``groups``, by Megatron's names of them."""
    for layer in layers_with_experts(module):
        for name, group in groups.items():
            if hasattr(layer.router, name):
                setattr(layer.router, name, group)


def forget_sent_tokens(modules: Iterable[torch.nn.Module]) -> None:
    """Set the counts of :func:`sent_tokens` to zero."""
    for _, dispatcher in _dispatchers(modules):
        dispatcher.forget_tokens()


def sent_tokens(modules: Iterable[torch.nn.Module]) -> dict[int, tuple[int, ...]]:
    """Return unit → tokens that this rank sent to each expert of a crew since :func:`forget_sent_tokens`."""
    return {unit: dispatcher.counted_tokens() for unit, dispatcher in _dispatchers(modules)}


def expert_of(name: str, experts: Sequence[int]) -> tuple[str, int | None]:
    """Return a parameter's name with the expert's number in the layer, and that number; ``None`` for no expert.

    ``experts``: the experts of this rank.
    """
    found = _LOCAL.search(name)
    if found is None:
        return name, None
    expert = experts[int(found[0])]
    return f"{name[: found.start()]}{expert}{name[found.end() :]}", expert


def is_expert(name: str) -> bool:
    """Return whether the parameter of this name belongs to experts that receive some of the tokens."""
    return _EXPERTS.search(name) is not None


def _dispatchers(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[int, CrewDispatcher]]:
    """Yield (unit, dispatcher) of each layer of a crew. Layers of further tokens have numbers of their own."""
    for module in modules:
        for layer in layers_with_experts(module):
            if isinstance(layer.token_dispatcher, CrewDispatcher) and not layer.router.is_mtp_layer:
                yield int(layer.layer_number), layer.token_dispatcher


def layers_with_experts(module: torch.nn.Module) -> list[Any]:
    """Return the layers in ``module`` that route tokens to experts, in the order of its modules."""
    return [layer for layer in module.modules() if isinstance(layer, MoELayer)]
