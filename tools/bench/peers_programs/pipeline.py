"""Two pipeline stages of the peers' model: all micro-batches forward, then all backward (GPipe, Huang et al. 2019).

Sending and receiving are operations of autograd: the backward of a send receives the gradient. So a stage is a module
whose output has a ``backward`` like any other, and each peer wraps it as it wraps a whole model.

Invariant: sends do not block, and each is waited for before its stage computes the next step. A stage that waits
therefore waits for its neighbour alone. Tags are the numbers of the micro-batches.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tools.bench.peers_programs import common

__all__ = ["First", "Last"]

MICRO_BATCHES = 4
SPLIT = common.LAYERS // 2


class _Sent(torch.autograd.Function):
    """Forward: send states to the last stage, return a zero. Backward: receive their gradient."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, stage: First, tag: int) -> torch.Tensor:
        ctx.shape, ctx.stage, ctx.tag = states.shape, stage, tag
        stage.send(states, tag)
        return states.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.stage.receive(ctx.shape, ctx.tag), None, None


class _Received(torch.autograd.Function):
    """Forward: receive states from the first stage. Backward: send their gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, stage: Last, rows: int, tag: int) -> torch.Tensor:
        ctx.stage, ctx.tag = stage, tag
        return stage.receive(torch.Size((rows, common.SEQUENCE, common.HIDDEN)), tag)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.stage.send(gradients[0], ctx.tag)
        return torch.zeros(()), None, None, None


class _Stage(nn.Module):
    """Layers of the model, and messages to the other stage. ``group`` has the two ranks of the replica."""

    def __init__(self, model: common.Gpt, layers: slice, other: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.tokens = model.tokens
        self.layers = model.layers[layers]
        self._other, self._group = other, group
        self._sends: list[tuple[dist.Work | None, torch.Tensor]] = []

    def send(self, states: torch.Tensor, tag: int) -> None:
        """Begin to send ``states``, which are kept until the next step."""
        kept = states.detach().contiguous()
        self._sends.append((dist.isend(kept, group=self._group, group_dst=self._other, tag=tag), kept))

    def receive(self, shape: torch.Size, tag: int) -> torch.Tensor:
        """Return the tensor that the other stage sent with ``tag``."""
        states = torch.empty(shape)
        dist.recv(states, group=self._group, group_src=self._other, tag=tag)
        return states

    def wait_for_sends(self) -> None:
        """Wait until the sends of the step before have ended."""
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        self._sends.clear()

    def compute(self, states: torch.Tensor) -> torch.Tensor:
        """Return states of the same shape [rows, sequence, hidden]."""
        for layer in self.layers:
            states = layer(states)
        return states


class First(_Stage):
    """Embeddings and the first half of the layers."""

    def __init__(self, model: common.Gpt, group: dist.ProcessGroup) -> None:
        super().__init__(model, slice(None, SPLIT), 1, group)
        self.positions = model.positions

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Compute ``samples`` [rows, sequence + 1]; return a zero whose backward receives the gradients."""
        self.wait_for_sends()
        total = torch.zeros(())
        for tag, rows in enumerate(samples.chunk(MICRO_BATCHES)):
            states = self.tokens(rows[:, :-1]) + self.positions.weight
            total = total + _Sent.apply(self.compute(states), self, tag)  # type: ignore[no-untyped-call]
        return total


class Last(_Stage):
    """The second half of the layers, the last norm, and a copy of the embedding as the output layer."""

    def __init__(self, model: common.Gpt, group: dist.ProcessGroup) -> None:
        super().__init__(model, slice(SPLIT, None), 0, group)
        self.last_norm = model.last_norm

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of ``samples`` [rows, sequence + 1]."""
        self.wait_for_sends()
        total = torch.zeros(())
        anchor = torch.zeros((), requires_grad=True)
        for tag, rows in enumerate(samples.chunk(MICRO_BATCHES)):
            received = _Received.apply(anchor, self, len(rows), tag)  # type: ignore[no-untyped-call]
            states = self.compute(received)
            logits = self.last_norm(states) @ self.tokens.weight.t()
            total = total + common.mean_loss(logits, rows[:, 1:]) * (len(rows) / len(samples))
        return total
