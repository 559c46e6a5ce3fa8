"""A model whose cells cut the weights over tensor-parallel groups, and the sequence over these groups, in any sizes.

A unit is that of :mod:`cut_model`, applied to x + m, where m are the means of :mod:`shared_model`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from megatron.elastic.engine.compute.sequence_cut import SequenceCut
from megatron.elastic.state.layout import ParamSpec
from tests.cluster.cut_model import CutModel
from tests.cluster.model import LENGTH
from tests.cluster.shared_model import SharedSequence, longest_part

__all__ = ["GridModel"]


class GridModel(SharedSequence, CutModel):
    """Implements :class:`ModelInterface` for ``units`` units, at any place of a cell of any sizes."""

    def largest_part(self, tensor: int, parts: int, parameters: Collection[ParamSpec]) -> int | None:
        """See :class:`ModelInterface`."""
        whole = super().largest_part(tensor, 1, parameters)
        return None if whole is None or parts > LENGTH else whole * longest_part(parts) // LENGTH

    def refusal(self, tensor: int, parts: int, stages: int) -> str:
        """See :class:`ModelInterface`: the chunks of two parts are of one length, as in Megatron."""
        uneven = parts > 1 and LENGTH % (2 * parts)
        return f"CP {parts} takes a length that is a multiple of {2 * parts}, and it is {LENGTH}" if uneven else ""

    def cut_sequence(self) -> SequenceCut | None:
        """See :class:`ModelInterface`."""
        return None if self._place.team is None else SequenceCut(LENGTH, tensor=self._place.team)

    def _run(self, unit: int, x: torch.Tensor) -> torch.Tensor:
        return super()._run(unit, x + self._means(x))
