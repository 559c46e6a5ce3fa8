"""The token dispatcher of a crew: tokens go to the homes of their experts, however many experts each rank has.

Megatron's dispatchers need the same number of experts on each rank. This one has the six methods that its ``MoELayer``
calls, and takes homes from a :class:`Crew`. A rank without tokens takes part in each exchange. Micro-batches are routed
before, each by itself, so the result does not depend on homes.

An expert may have several homes: *replicas*. Each receives every n-th of a rank's tokens for it, counted in the order
of tokens, so all have about as many, and a layer that is recomputed sends each token where it was before.

A token goes to every rank of a home that has a part of its expert, and the sum of what comes back is the expert's
output. So tensor parallelism inside experts needs no exchange of its own: the ranks of a cell send tokens of their
parts of the sequence, and each part of an expert receives those of all.

Tokens and their probabilities are exchanged in one node of the autograd graph. So the backward exchanges of all ranks
are in the same order, also where a rank's own graph would let autograd choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.elastic.engine.compute.model_interface import Crew

__all__ = ["CrewDispatcher"]

GroupOf = Callable[[tuple[int, ...]], dist.ProcessGroup]
"""The ranks of a crew → their process group."""


@dataclass(frozen=True)
class _Route:
    """Everything about one dispatch that its way back needs."""

    shape: torch.Size
    token: torch.Tensor
    """Position of the token of each row that this rank sends."""
    sends: Sequence[int]
    """Number of rows for each rank of the crew."""
    takes: Sequence[int]
    """Number of rows from each rank of the crew."""
    by_expert: torch.Tensor
    """Row in the order of experts → its position in the order of arrival."""
    tokens_per_expert: torch.Tensor


class CrewDispatcher:
    """Sends the tokens of ``rank`` to the experts of its ``crew``. ``group_of`` is called at the first exchange."""

    def __init__(self, crew: Crew, rank: int, group_of: GroupOf) -> None:
        self._crew = crew
        self._group_of = group_of
        self._order = torch.tensor([expert for mine in crew.experts for expert in mine])
        self._counts = [len(mine) for mine in crew.experts]
        self._replicas = torch.tensor([crew.replicas[expert] for mine in crew.experts for expert in mine])
        """Number of homes of the expert at each place."""
        self._turns = torch.tensor(_turns(crew, crew.ranks.index(rank)))
        self._replicated = max(crew.replicas.values(), default=1) > 1
        first = sum(self._counts[: crew.ranks.index(rank)])
        self._mine = slice(first, first + len(crew.experts_of(rank)))
        self._route: _Route | None = None
        self._routed: torch.Tensor | None = None

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._group_of(self._crew.ranks) if len(self._crew.ranks) > 1 else None

    def forget_tokens(self) -> None:
        """Set the counts of :meth:`counted_tokens` to zero."""
        self._routed = None

    def counted_tokens(self) -> tuple[int, ...]:
        """Return the tokens that each expert of the layer received from this rank since :meth:`forget_tokens`.

        Of forward passes with a backward. Waits for the device.
        """
        experts = len(set(self._order.tolist()))
        return (0,) * experts if self._routed is None else tuple(map(int, self._routed.tolist()))

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows to send and their probabilities, in the order of homes, then of tokens.

        ``hidden_states``: [s, b, h] or [tokens, h]; ``routing_map``, ``probs``: [tokens, experts].
        """
        if torch.is_grad_enabled():  # once, also where the layer is recomputed
            counts = routing_map.sum(dim=0)
            self._routed = counts if self._routed is None else self._routed + counts
        order = self._order.to(routing_map.device)
        place, token = self._chosen(routing_map, order).t().nonzero(as_tuple=True)
        counts = torch.bincount(place, minlength=order.numel())
        everyone = self._exchanged_counts(counts)
        mine = everyone[:, self._mine].cpu()
        arrived = torch.arange(mine.shape[1]).repeat(mine.shape[0]).repeat_interleave(mine.reshape(-1))
        self._route = _Route(
            hidden_states.shape,
            token,
            [int(part.sum()) for part in counts.cpu().split(self._counts)],
            mine.sum(dim=1).tolist(),
            torch.argsort(arrived, stable=True).to(hidden_states.device),
            mine.sum(dim=0),
        )
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).index_select(0, token)
        return rows, probs[token, order[place]]

    def token_dispatch(self, rows: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows that arrive for this rank's experts, with their probabilities."""
        route, group = self._known(), self._group
        if group is None:
            return rows, probs
        return _Exchange.apply(group, route.takes, route.sends, rows, probs)  # type: ignore[no-any-return, no-untyped-call]

    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows in the order of this rank's experts, the number of rows of each expert, and probabilities."""
        route = self._known()
        return rows.index_select(0, route.by_expert), route.tokens_per_expert, probs.index_select(0, route.by_expert)

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """Return no buffers: experts write into tensors of their own. Megatron calls this from 0.19 on."""
        return None, None

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the experts' output in the order in which its rows arrived."""
        back = torch.argsort(self._known().by_expert)
        return hidden_states.index_select(0, back)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the output for the rows that this rank sent."""
        route, group = self._known(), self._group
        if group is None:
            return hidden_states
        return _Exchange.apply(group, route.sends, route.takes, hidden_states)[0]  # type: ignore[no-any-return, no-untyped-call]

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sum over experts for each token, in the shape of the layer's input."""
        route = self._known()
        width = route.shape[-1]
        whole = hidden_states.new_zeros((route.shape[:-1].numel(), width)).index_add(0, route.token, hidden_states)
        return whole.view(route.shape)

    def _chosen(self, routing_map: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Return [token, place of an expert] → whether the token goes there: to one of the homes of each expert."""
        wanted = routing_map.index_select(1, order)
        if not self._replicated:
            return wanted
        device = routing_map.device
        number = routing_map.cumsum(dim=0).index_select(1, order)
        return wanted & (number % self._replicas.to(device) == self._turns.to(device))

    def _known(self) -> _Route:
        assert self._route is not None, "a layer prepares its tokens before it sends them"
        return self._route

    def _exchanged_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Return [rank, place of an expert] → number of rows, from all ranks of the crew."""
        group = self._group
        everyone = counts.new_zeros((len(self._crew.ranks), counts.numel()))  # a rank without peers hears no others
        if group is None:
            return everyone.copy_(counts.unsqueeze(0))
        dist.all_gather_into_tensor(everyone.view(-1), counts, group=group)
        return everyone


def _turns(crew: Crew, sender: int) -> list[int]:
    """Return, for each place of an expert, which of a sender's tokens go there: those of this number modulo replicas.

    Senders begin with different replicas, so that none has one token more from each of them.
    """
    met, found = dict.fromkeys(crew.replicas, 0), list[int]()
    for home in crew.homes:
        turns = [(met[expert] + sender) % crew.replicas[expert] for expert in home]
        met.update((expert, met[expert] + 1) for expert in home)
        found += turns * crew.cut
    return found


class _Exchange(torch.autograd.Function):
    """All-to-all of each of some tensors, which have the same number of rows."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, takes: Sequence[int], sends: Sequence[int], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.takes, ctx.sends = group, takes, sends
        return tuple(_exchanged(group, takes, sends, tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, *(_exchanged(ctx.group, ctx.sends, ctx.takes, gradient) for gradient in gradients)


def _exchanged(
    group: dist.ProcessGroup, takes: Sequence[int], sends: Sequence[int], tensor: torch.Tensor
) -> torch.Tensor:
    result = tensor.new_empty((sum(takes), *tensor.shape[1:]))
    dist.all_to_all_single(result, tensor.contiguous(), list(takes), list(sends), group=group)
    return result
