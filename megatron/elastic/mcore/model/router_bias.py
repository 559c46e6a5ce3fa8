"""The bias of Megatron's routers, and the tokens that they count for it (:mod:`megatron.elastic.state.expert_bias`).

Megatron keeps both in buffers of each router, adds the counts up over all ranks when gradients are complete, and
updates the bias. Here the counts go through the vote, and every pass begins with the bias of the step's record.

Invariant: buffers are replaced, not written, so a checkpoint that is being planned keeps the bias of its own step. Both
are fp32 in a model of 16 bits too, where Megatron counts in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron.elastic.mcore.model.prediction import further_unit

__all__ = ["counted_tokens", "forget_tokens", "present_bias", "set_bias"]


def set_bias(modules: Iterable[torch.nn.Module], bias: Mapping[int, Sequence[float]]) -> None:
    """Set the bias of the routers in ``modules``: unit → one number an expert."""
    for unit, router in _routers(modules):
        router.expert_bias = torch.tensor(bias[unit], dtype=torch.float32, device=router.expert_bias.device)


def present_bias(modules: Iterable[torch.nn.Module]) -> dict[int, tuple[float, ...]]:
    """Return unit → bias of its router."""
    return {unit: tuple(router.expert_bias.float().tolist()) for unit, router in _routers(modules)}


def forget_tokens(modules: Iterable[torch.nn.Module]) -> None:
    """Set the counts of the routers in ``modules`` to zero."""
    for _, router in _routers(modules):
        router.local_tokens_per_expert = torch.zeros_like(router.expert_bias, dtype=torch.float32)


def counted_tokens(modules: Iterable[torch.nn.Module]) -> dict[int, tuple[int, ...]]:
    """Return unit → tokens that each expert received since :func:`forget_tokens`."""
    return {unit: tuple(map(int, router.local_tokens_per_expert.tolist())) for unit, router in _routers(modules)}


def _routers(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[int, Any]]:
    """Yield (unit, router) of each router with a bias.

    Megatron numbers layers as units are, and those that predict further tokens apart, from 1.
    """
    for module in modules:
        for part in module.modules():
            if isinstance(part, TopKRouter) and part.expert_bias is not None:
                number = int(part.layer_number)
                yield further_unit(part.config, number) if part.is_mtp_layer else number, part
