"""The interface through which the engine uses a model.

Implementations are Megatron's ``GPTModel`` (``mcore/model/gpt.py``) and a few linear
layers in unit tests. A model is cut into *units*: compute units ``0 … U-1`` in pipeline
order, then state-only units (a weight that several compute units share, such as tied
embeddings).

Tensors between units are ``[sequence, rows, hidden]``: rows, the samples of a
piece, are dimension 1 everywhere, as in Megatron.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from megatron.elastic.engine.compute.sequence_cut import SequenceCut
from megatron.elastic.plan.model import Piece
from megatron.elastic.state.coverage import Overlap, Position
from megatron.elastic.state.layout import ParamSpec

__all__ = [
    "ROW_DIM",
    "CellPlace",
    "Covered",
    "Crew",
    "DeferredWeights",
    "ForwardStep",
    "LossOutput",
    "ModelInterface",
    "UnitParameter",
    "only_at_launch",
    "place_of",
]

ROW_DIM = 1

ForwardStep = Callable[[Iterator[Any], Any], tuple[torch.Tensor, Callable[[torch.Tensor], Any]]]
"""Megatron's compute contract: ``forward_step_func(data_iterator, model) → (output, loss_func)``."""


@dataclass(frozen=True)
class Crew:
    """The ranks that exchange tokens, and the *homes* of experts among them.

    The home of an expert is one rank of a crew, or adjacent ranks of a cell with a part of it each. An expert may have
    several homes, *replicas*: each of its tokens goes to one of them.
    """

    ranks: tuple[int, ...]
    """Those of each of its cells together, or some of one cell."""
    experts: tuple[tuple[int, ...], ...]
    """The experts of each of these ranks, ascending."""
    cut: int = 1
    """Number of adjacent ranks with a part each of the same experts."""

    @property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """The experts of each home, in the order of ranks."""
        return self.experts[:: self.cut]

    @cached_property
    def replicas(self) -> Mapping[int, int]:
        """Expert → number of its homes."""
        return Counter(expert for home in self.homes for expert in home)

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Return the experts of which ``rank`` is a home, or has a part."""
        return self.experts[self.ranks.index(rank)]

    def part_of(self, rank: int) -> Position:
        """Return the part of its experts that ``rank`` has."""
        return Position(self.ranks.index(rank) % self.cut, self.cut)


@dataclass(frozen=True)
class CellPlace:
    """A rank's place in its cell, and its crew where ranks share experts.

    The ranks of a cell are tensor-parallel groups of one size, one after the other. Each has one part of the sequence
    (:mod:`~megatron.elastic.engine.compute.sequence_cut`) and all shards of the weights.
    """

    ranks: tuple[int, ...]
    """The ranks of the cell, in order."""
    index: int
    """Which of them this rank is."""
    crew: Crew | None = None
    team: int | None = None
    """Number of ranks of each group where the cells of a job share the sequence; None: a cell is one group."""

    @property
    def parts(self) -> int:
        """Number of parts of the sequence."""
        return 1 if self.team is None else max(1, len(self.ranks) // self.team)

    @property
    def position(self) -> Position:
        """The place in the tensor-parallel group, without the names of the ranks."""
        size = len(self.ranks) // self.parts
        return Position(self.index % size, size)

    @property
    def part(self) -> Position:
        """Which part of the sequence this rank has, and of how many."""
        return Position(self.index // (len(self.ranks) // self.parts), self.parts)

    @property
    def tensor_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's tensor-parallel group."""
        size = len(self.ranks) // self.parts
        return self.ranks[self.part.index * size : (self.part.index + 1) * size]

    @property
    def context_ranks(self) -> tuple[int, ...]:
        """The ranks at this tensor-parallel position, one a part of the sequence."""
        return self.ranks[self.position.index :: len(self.ranks) // self.parts]


Covered = Callable[[int, Position], tuple[int, ...]]
"""The shards of a unit of which a rank at a position computes a part (:meth:`ModelInterface.covered`)."""


@dataclass(frozen=True)
class LossOutput:
    """The output of a pipeline's last segment for one piece.

    ``loss`` is a scalar: the sum over the piece's tokens if ``tokens`` is
    given, else the piece's own mean. ``report`` holds the logged values, each a
    tensor of one (mean) or two elements (sum, count). Where ranks share the sequence,
    ``loss`` is the sum over this rank's tokens; ``tokens`` and ``report`` are those of the cell.
    """

    loss: torch.Tensor
    tokens: torch.Tensor | None
    report: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class UnitParameter:
    """One parameter of a unit: its layout, and the live tensor whose storage the engine moves into its arena.

    ``spec`` is the launch's. In a cell of another tensor-parallel size the live tensor may have another shape;
    ``overlaps`` then say which parts of which shards it holds (None: its own shard's, whole).
    """

    spec: ParamSpec
    parameter: torch.nn.Parameter
    overlaps: tuple[Overlap, ...] | None = None


class DeferredWeights(Protocol):
    """Weight gradients that a piece's backward pass left out."""

    def run(self, accumulate: Callable[[torch.nn.Parameter, torch.Tensor], None]) -> None:
        """Compute them in the order of the backward pass, pass each to ``accumulate``, and forget them."""


class ModelInterface(Protocol):
    """The part of a model that this process holds."""

    compute_units: int
    """U, the number of units of a whole pipeline."""

    def prepare(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """Build as much as possible of the modules for ``hold(units, place)``; on any thread, beside a step."""

    def hold(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """Hold exactly ``units`` from now on: build missing ones (values undefined), free the others.

        ``place``: this rank's place in its cell; units are built anew when its position changes. ``None``: its place
        at the launch. Raises ``ValueError`` if one rank cannot hold these units together, or not at that place.
        """

    def covered(self, unit: int, position: Position) -> tuple[int, ...]:
        """Return the shards, ascending and without the common part, of which a rank at ``position`` computes a part.

        For cells of another size than at the launch, and any unit. The same on every rank. Raises ``ValueError`` if
        a cell of that size cannot compute the model.
        """

    def overlaps(self, spec: ParamSpec, place: CellPlace) -> tuple[Overlap, ...] | None:
        """Return the ``overlaps`` (:class:`UnitParameter`) that a parameter has while units are held at ``place``.

        On any thread, and of any parameter of the model.
        """

    def largest_part(self, tensor: int, parts: int, parameters: Collection[ParamSpec]) -> int | None:
        """Return the largest part of a layer that one rank of a cell computes, in millionths.

        ``tensor``: ranks of a tensor-parallel group; ``parts``: such groups, which share the sequence. The same on
        every rank, so it asks about the ``parameters`` of the whole model, not about those that this process holds.
        ``None`` if such a cell cannot compute the model.
        """

    def refusal(self, tensor: int, parts: int, stages: int) -> str:
        """Return why no job has ``stages`` cells of ``parts`` groups of ``tensor`` ranks a replica; empty: it may.

        While no rank is missing; after a loss other cells may compute the model (:meth:`largest_part`).

        The same on every rank.
        """

    def objection(self, parts: int) -> str:
        """Return why this process cannot compute one of ``parts`` parts of the sequence; empty: it knows no reason.

        From what it has run so far, so other ranks may know more.
        """

    def held_units(self) -> tuple[int, ...]:
        """Return the units whose parameters this process holds (compute and state-only), ascending."""

    def unit_parameters(self, unit: int) -> Sequence[UnitParameter]:
        """Return the parameters of a held unit, in the same order on every holder."""

    def boundary(self, rows: int) -> tuple[torch.Size, torch.dtype]:
        """Return shape and type of the tensor that enters and leaves a segment of ``rows`` rows on this rank.

        Where ranks share the sequence it has this rank's positions, as by :meth:`cut_sequence`.
        """

    def cut_sequence(self) -> SequenceCut | None:
        """Return how the cells of now cut the sequence over their ranks; ``None`` if each rank has all of it."""

    def activation_bytes(self, unit: int) -> int:
        """Return the bytes a row that a compute unit's forward keeps for its backward; for any unit."""

    def quantized_bytes(self, spec: ParamSpec) -> int:
        """Return the bytes of the copies of a parameter in 8 bits that its layer keeps; of any unit."""

    def used_ppm(self, spec: ParamSpec) -> int:
        """Return how many positions of a row multiply a matrix of any unit, in parts per million of all."""

    def forward(
        self,
        step: ForwardStep,
        piece: Piece,
        place: tuple[int, int],
        source: torch.Tensor | None,
        batches: Iterator[Any],
    ) -> torch.Tensor | LossOutput:
        """Run ``piece`` through its units, any contiguous range of the held ones.

        ``place``: (position, count) of a stage that is the first, or the last, exactly if the piece is
        (:func:`place_of`).
        ``source``: ``[s, rows, h]`` from the units before, ``None`` for the first.
        """

    def ghost(self, piece: Piece, place: tuple[int, int]) -> torch.Tensor:
        """Take part in the exchanges of a crew's forward of ``piece``, which has no rows.

        Returns the output of its last layer, without rows; the backward of that takes part in the crew's backward.
        """

    def deferring(self, piece: Piece) -> AbstractContextManager[DeferredWeights]:
        """Return a context in which backward passes of ``piece`` defer their weight gradients to the yielded object.

        For a piece whose backward is split: enter it around the forward, and again around the input gradients.
        """

    def announcing(self, told: Callable[[int], None]) -> AbstractContextManager[None]:
        """Return a context in which forward passes call ``told(unit)`` before they read a compute unit's parameters.

        Also for units whose parameters they read again, as when activations are recomputed.
        """

    def reads_data(self) -> bool:
        """Return whether this rank reads the data set itself; the model code sends the data to the rest of the cell."""

    def takes_batch(self, piece: Piece) -> bool:
        """Return whether a forward of ``piece`` takes a batch; those of the first and the last unit always do."""

    def finish_gradients(self, grads: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Complete gradients inside the cell (layer norms under sequence parallelism), in place.

        ``grads[unit]`` lists fp32 views in the order of :meth:`unit_parameters`.
        """

    def separate_uses(self, contribute: Callable[[int, str, torch.Tensor], None]) -> None:
        """Pass the gradient of every use of a shared weight but one to ``contribute(unit, name, gradient)``.

        Without this call autograd adds them up in ``parameter.grad`` (:mod:`exact_gradients`).
        """

    def parameters_changed(self) -> None:
        """Forget what layers have made of their parameters: those of the next forward may have other values."""

    def weigh_layer_losses(self, weight: float) -> None:
        """Multiply the gradients of losses that layers add (those that balance experts) by ``weight`` from now on."""

    def layer_losses(self) -> Mapping[str, tuple[float, float]]:
        """Return name → (sum, number of values) of these losses since :meth:`weigh_layer_losses`, over the cell.

        Collective in the cell.
        """

    def set_expert_bias(self, bias: Mapping[int, Sequence[float]]) -> None:
        """Use ``bias`` (unit → one number an expert) in the routers of layers from now on; empty: they have none."""

    def expert_tokens(self) -> Mapping[int, Sequence[int]]:
        """Return unit → tokens that each expert received from this rank since :meth:`weigh_layer_losses`.

        Only of routers with a bias, and of layers whose experts ranks share.
        """

    def set_scales(self, scales: Mapping[int, Sequence[float]]) -> None:
        """Use ``scales`` (unit → one a tensor in FP8) from now on, and forget :meth:`amaxes`.

        Both are called only where scales follow past steps.
        """

    def amaxes(self) -> Mapping[int, Sequence[float]]:
        """Return unit → largest absolute value of each of its tensors in FP8 since :meth:`set_scales`."""

    def train(self, mode: bool) -> None:
        """Switch between training and evaluation mode (dropout)."""


def only_at_launch(unit: int, position: Position) -> tuple[int, ...]:
    """Raise ``ValueError``: :meth:`ModelInterface.covered` of a model whose cells always have the launch's size."""
    raise ValueError(f"unit {unit}: this model is not computed by cells of {position.count} ranks")


def place_of(first: int, end: int, units: int) -> tuple[int, int]:
    """Return (position, count) of units ``[first, end)`` of ``units`` in the shortest pipeline with such a stage."""
    before, after = int(first > 0), int(end < units)
    return before, before + 1 + after
