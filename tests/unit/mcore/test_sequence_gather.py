"""A part of a sequence knows its positions, and masks by them; forked ranks gather in ``test_context_layers.py``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.compute.sequence_cut import SequenceCut, length_of, taken
from megatron.elastic.mcore.model.context_parallel import causal_mask
from megatron.elastic.mcore.model.sequence_gather import SequencePart, gathered
from megatron.elastic.state.coverage import Position


@given(st.integers(1, 5), st.integers(1, 3), st.integers(4, 30), st.booleans())
def test_masks_of_the_parts_are_the_rows_of_the_whole_one(count: int, tensor: int, length: int, cut: bool) -> None:
    whole = torch.ones(length, length).triu(1).bool()
    for index in range(count):
        part = SequencePart(SequenceCut(length, cut, tensor), Position(index, count), None)
        assert length_of(part.runs) <= part.longest
        if part.runs:
            assert torch.equal(causal_mask(part.runs, length, torch.device("cpu"))[0, 0], taken(whole, part.runs, 0))


def test_a_tensor_of_another_length_is_refused() -> None:
    part = SequencePart(SequenceCut(8, tensor=1), Position(0, 2), None)
    with pytest.raises(ValueError, match="3 positions"):
        gathered(part, torch.zeros(3, 1))


def test_one_part_is_the_whole() -> None:
    tensor = torch.zeros(8, 1)
    assert gathered(SequencePart(SequenceCut(8, tensor=1), Position(0, 1), None), tensor) is tensor
