"""What the engine needs of a model, and nothing more.

The model stays whoever's it is (Megatron's ``GPTModel`` behind
``mcore/model/gpt.py``; a few linear layers in unit tests). It is cut into *units*:
compute units ``0 … U-1`` in pipeline order, then state-only units (a weight
that several compute units share, such as tied embeddings).

Tensors between units are ``[sequence, rows, hidden]``: rows, the samples of a
piece, are dimension 1 everywhere, as in Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron.elastic.plan.model import Piece
from megatron.elastic.state.layout import ParamSpec

__all__ = ["ROW_DIM", "DeferredWeights", "ForwardStep", "LossOutput", "ModelInterface", "UnitParameter", "place_of"]

ROW_DIM = 1

ForwardStep = Callable[[Iterator[Any], Any], tuple[torch.Tensor, Callable[[torch.Tensor], Any]]]
"""Megatron's compute contract: ``forward_step_func(data_iterator, model) → (output, loss_func)``."""


@dataclass(frozen=True)
class LossOutput:
    """What the last segment of a pipeline yields for one piece.

    ``loss`` is a scalar: the sum over the piece's tokens when ``tokens`` is
    given, else the piece's own mean. ``report`` holds what is logged, each a
    tensor of one (mean) or two elements (sum, count).
    """

    loss: torch.Tensor
    tokens: torch.Tensor | None
    report: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class UnitParameter:
    """One parameter of a unit: how it is laid out, and the live tensor whose storage the engine re-homes."""

    spec: ParamSpec
    parameter: torch.nn.Parameter


class DeferredWeights(Protocol):
    """Weight gradients that a piece's backward pass left out."""

    def run(self, accumulate: Callable[[torch.nn.Parameter, torch.Tensor], None]) -> None:
        """Form them, in the order the backward pass met them, and hand each to ``accumulate``; then forget them."""


class ModelInterface(Protocol):
    """The part of a model that this process holds."""

    compute_units: int
    """U: how many units a whole pipeline computes."""

    def prepare(self, units: Collection[int]) -> None:
        """Have ready what ``hold(units)`` would have to build, as far as it can be; on any thread, beside a step."""

    def hold(self, units: Collection[int]) -> None:
        """Hold exactly ``units`` from now on: build what is missing (values undefined), free the rest.

        Raises ``ValueError`` when these units cannot be held together.
        """

    def held_units(self) -> tuple[int, ...]:
        """Units whose parameters live here (compute and state-only), ascending."""

    def unit_parameters(self, unit: int) -> Sequence[UnitParameter]:
        """Parameters of a held unit, in an order that is the same on every holder."""

    def boundary(self, rows: int) -> tuple[torch.Size, torch.dtype]:
        """Shape and type of the tensor that enters and leaves a segment of ``rows`` rows."""

    def activation_bytes(self, unit: int) -> int:
        """Bytes that a compute unit's forward keeps for its backward, a row; any unit, held here or not."""

    def forward(
        self,
        step: ForwardStep,
        piece: Piece,
        place: tuple[int, int],
        source: torch.Tensor | None,
        batches: Iterator[Any],
    ) -> torch.Tensor | LossOutput:
        """Run ``piece`` through its units, any contiguous ones of those held.

        ``place``: (position, count) of the piece in its pipeline, as far as it matters: whether it is the
        first and the last.
        ``source``: ``[s, rows, h]`` from the units before, ``None`` for the first.
        """

    def deferring(self, piece: Piece) -> AbstractContextManager[DeferredWeights]:
        """For a piece whose backward is split: entered around its forward, and again around its input gradients.

        Backward passes that run inside leave weight gradients in what the context yields.
        """

    def reads_data(self) -> bool:
        """Whether this rank reads the data set itself (others of its cell are sent it by the model code)."""

    def finish_gradients(self, grads: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Complete gradients inside the cell (layer norms under sequence parallelism), in place.

        ``grads[unit]`` lists fp32 views in the order of :meth:`unit_parameters`.
        """

    def separate_uses(self, contribute: Callable[[int, str, torch.Tensor], None]) -> None:
        """Hand the gradient of every use of a shared weight but one to ``contribute(unit, name, gradient)``.

        Without this call autograd adds them up in ``parameter.grad`` (:mod:`exact_gradients`).
        """

    def train(self, mode: bool) -> None:
        """Switch dropout and the like on or off."""


def place_of(first: int, end: int, units: int) -> tuple[int, int]:
    """(position, count) of units ``[first, end)`` of ``units`` in the shortest pipeline that has such a stage."""
    before, after = int(first > 0), int(end < units)
    return before, before + 1 + after
