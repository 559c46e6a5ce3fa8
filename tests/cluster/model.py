"""A model of a few layers: a linear unit each, as the engine sees any model.

Each unit is ``tanh(x W + b)``; the loss is the mean square of what the last one yields against the sample's target.
Samples and initial weights are functions of their numbers, so that every process has the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset

from megatron.elastic.engine.compute.model_interface import (
    ROW_DIM,
    CellPlace,
    DeferredWeights,
    ForwardStep,
    LossOutput,
    UnitParameter,
    only_at_launch,
)
from megatron.elastic.engine.compute.sequence_cut import SequenceCut
from megatron.elastic.plan.cost import PPM
from megatron.elastic.plan.model import Piece
from megatron.elastic.state.coverage import Position
from megatron.elastic.state.layout import ParamSpec

__all__ = ["LENGTH", "LossyModel", "Samples", "TinyModel", "UnitChain", "collate", "forward_step"]

LENGTH, WIDTH = 4, 20
"""Positions of a sample, and numbers at each: a unit has two blocks of state at the smallest block size."""


class Samples(Dataset[torch.Tensor]):
    """Sample ``n``: ``[2, length, width]``, an input and its target."""

    def __getitem__(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(2, LENGTH, WIDTH, generator=generator)


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """``[rows, length, width]`` each."""
    both = torch.stack(samples)
    return {"input": both[:, 0], "target": both[:, 1]}


def forward_step(batches: Iterator[Any], model: Any) -> Any:
    """The model of this package computes by itself."""
    raise AssertionError("not called")


class UnitChain:
    """The part of :class:`ModelInterface` that models of the tests share: units that each map ``[s, rows, h]``."""

    compute_units: int
    _told: Callable[[int], None] = staticmethod(lambda unit: None)

    @contextmanager
    def announcing(self, told: Callable[[int], None]) -> Iterator[None]:
        """See :class:`ModelInterface`."""
        self._told = told
        try:
            yield
        finally:
            del self._told

    def _run(self, unit: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output of a held unit."""
        raise NotImplementedError

    def boundary(self, rows: int) -> tuple[torch.Size, torch.dtype]:
        """See :class:`ModelInterface`."""
        return torch.Size((LENGTH, rows, WIDTH)), torch.float32

    def cut_sequence(self) -> SequenceCut | None:
        """See :class:`ModelInterface`."""
        return None

    def _slice(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the positions of an input that this rank holds."""
        return whole

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return the positions of an output whose loss this rank computes."""
        return x

    def _compared(self, target: torch.Tensor) -> torch.Tensor:
        """Return the positions of a target that :meth:`_whole` has."""
        return target

    def _over_parts(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sums over all ranks that compute the loss of other positions."""
        return sums

    def refusal(self, tensor: int, parts: int, stages: int) -> str:
        """See :class:`ModelInterface`."""
        return ""

    def objection(self, parts: int) -> str:
        """See :class:`ModelInterface`."""
        return ""

    def activation_bytes(self, unit: int) -> int:
        """See :class:`ModelInterface`."""
        return 8 * LENGTH * WIDTH

    def quantized_bytes(self, spec: ParamSpec) -> int:
        """See :class:`ModelInterface`: nothing is in FP8."""
        return 0

    def used_ppm(self, spec: ParamSpec) -> int:
        """See :class:`ModelInterface`: every position multiplies every matrix."""
        return PPM

    def forward(
        self,
        step: ForwardStep,
        piece: Piece,
        place: tuple[int, int],
        source: torch.Tensor | None,
        batches: Iterator[Any],
    ) -> torch.Tensor | LossOutput:
        """See :class:`ModelInterface`."""
        first, last = piece.first == 0, piece.end == self.compute_units
        batch = next(batches) if first or last else {}
        x = self._slice(batch["input"].transpose(0, ROW_DIM)) if source is None else source
        for unit in range(piece.first, piece.end):
            self._told(unit)
            x = self._run(unit, x)
        if not last:
            return x
        loss = (self._whole(x) - self._compared(batch["target"].transpose(0, ROW_DIM))).square().mean(-1).sum()
        total, tokens = self._over_parts(loss.detach().double()), torch.tensor(LENGTH * len(piece.rows))
        return LossOutput(loss, tokens, {"loss": torch.stack([total, tokens.double()])})

    def ghost(self, piece: Piece, place: tuple[int, int]) -> torch.Tensor:
        """See :class:`ModelInterface`."""
        raise AssertionError("no ranks share experts here")

    def deferring(self, piece: Piece) -> AbstractContextManager[DeferredWeights]:
        """See :class:`ModelInterface`."""
        raise AssertionError("no backward is split here")

    def reads_data(self) -> bool:
        """See :class:`ModelInterface`."""
        return True

    def takes_batch(self, piece: Piece) -> bool:
        """See :class:`ModelInterface`."""
        return piece.first == 0 or piece.end == self.compute_units

    def finish_gradients(self, grads: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Gradients need nothing more: a cell has one rank, or its ranks have equal gradients of what is replicated."""

    def parameters_changed(self) -> None:
        """Nothing is kept of parameters."""

    def weigh_layer_losses(self, weight: float) -> None:
        """No layer has a loss of its own."""

    def layer_losses(self) -> Mapping[str, tuple[float, float]]:
        return {}

    def separate_uses(self, contribute: Callable[[int, str, torch.Tensor], None]) -> None:
        """No weight is shared."""

    def set_expert_bias(self, bias: Mapping[int, Sequence[float]]) -> None:
        """See :class:`ModelInterface`: there are no routers."""

    def expert_tokens(self) -> Mapping[int, Sequence[int]]:
        """See :class:`ModelInterface`: there are no experts."""
        return {}

    def set_scales(self, scales: Mapping[int, Sequence[float]]) -> None:
        """See :class:`ModelInterface`: nothing is in FP8."""

    def amaxes(self) -> Mapping[int, Sequence[float]]:
        """See :class:`ModelInterface`: nothing is in FP8."""
        return {}

    def train(self, mode: bool) -> None:
        """Nothing is random."""


class TinyModel(UnitChain):
    """Implements :class:`ModelInterface` for ``units`` layers, of which this process holds ``held``."""

    def __init__(self, units: int, held: Collection[int]) -> None:
        self.compute_units = units
        self._layers = {unit: _layer(unit) for unit in sorted(held)}

    def prepare(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """Nothing takes long here."""

    def covered(self, unit: int, position: Position) -> tuple[int, ...]:
        """See :class:`ModelInterface`."""
        return only_at_launch(unit, position)

    def overlaps(self, spec: ParamSpec, place: CellPlace) -> None:
        """See :class:`ModelInterface`: every parameter is one shard's."""

    def largest_part(self, tensor: int, parts: int, parameters: Collection[ParamSpec]) -> int | None:
        """See :class:`ModelInterface`."""
        return 1_000_000 if (tensor, parts) == (1, 1) else None

    def hold(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """See :class:`ModelInterface`."""
        kept = {unit: self._layers[unit] for unit in units if unit in self._layers}
        self._layers = {unit: kept.get(unit) or _undefined() for unit in sorted(units)}

    def held_units(self) -> tuple[int, ...]:
        """See :class:`ModelInterface`."""
        return tuple(self._layers)

    def unit_parameters(self, unit: int) -> Sequence[UnitParameter]:
        """See :class:`ModelInterface`."""
        return [
            UnitParameter(ParamSpec(name, parameter.numel(), tuple(parameter.shape), sharded=False), parameter)
            for name, parameter in self._layers[unit].named_parameters()
        ]

    def _run(self, unit: int, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self._layers[unit](x))


class LossyModel(TinyModel):
    """Each layer adds a loss, of which only its value is of interest: unit ``u`` reports ``u`` for each row."""

    def __init__(self, units: int, held: Collection[int]) -> None:
        super().__init__(units, held)
        self._total, self._count = 0, 0

    def weigh_layer_losses(self, weight: float) -> None:
        """See :class:`ModelInterface`."""
        self._total, self._count = 0, 0

    def layer_losses(self) -> Mapping[str, tuple[float, float]]:
        """See :class:`ModelInterface`."""
        return {"of layers": (float(self._total), float(self._count))} if self._count else {}

    def _run(self, unit: int, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            rows = x.shape[ROW_DIM]
            self._total, self._count = self._total + unit * rows, self._count + rows
        return super()._run(unit, x)


def _layer(unit: int) -> torch.nn.Linear:
    layer = _undefined()
    generator = torch.Generator().manual_seed(1000 + unit)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * WIDTH**-0.5)
    return layer


def _undefined() -> torch.nn.Linear:
    with torch.random.fork_rng(devices=[]):
        layer = torch.nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))
    return layer
