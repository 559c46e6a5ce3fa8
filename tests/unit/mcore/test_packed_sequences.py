"""The mask of a packed row, and what its losses and flags come to."""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.compute.model_interface import LossOutput
from megatron.elastic.mcore.args.combinations import packing_faults
from megatron.elastic.mcore.model.packed_sequences import mean_of_rows, packed_mask


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 4))
def test_a_position_sees_those_before_it_in_its_own_sequence(lengths: list[int], more: int) -> None:
    """``more``: positions behind the last sequence, which are one of their own."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    length = int(ends[-1]) + more
    seen = torch.zeros(length, length, dtype=torch.bool)
    for start, stop in pairwise([*ends.tolist(), length]):
        seen[start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
    found = packed_mask(ends.to(torch.int32), length)
    assert found.shape == (1, 1, length, length) and torch.equal(~found[0, 0], seen)


def test_losses_of_an_evaluation_are_means_of_rows() -> None:
    loss, tokens = torch.tensor(6.0), torch.tensor(4)
    given = LossOutput(loss, tokens, {"lm loss": torch.tensor([6.0, 4.0]), "mean": torch.tensor([0.5])})
    found = mean_of_rows(given)
    assert found.loss is loss and found.tokens is tokens
    assert {key: value.tolist() for key, value in found.report.items()} == {"lm loss": [1.5, 1.0], "mean": [0.5]}
    empty = mean_of_rows(LossOutput(loss, tokens, {"lm loss": torch.zeros(2)})).report["lm loss"]
    assert empty.tolist() == [0.0, 1.0], "a row of prompts alone"


def faults(**more: Any) -> list[str]:
    plain = {
        "sft": True,
        "micro_batch_size": 1,
        "create_attention_mask_in_dataloader": False,
        "transformer_impl": "local",
        "context_parallel_size": 1,
    }
    return list(packing_faults(Namespace(**{**plain, **more})))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"micro_batch_size": 4}, "--micro-batch-size 4 with --sft"),
        ({"create_attention_mask_in_dataloader": True}, "--no-create-attention-mask-in-dataloader"),
        ({"context_parallel_size": 2}, "--sft with --context-parallel-size"),
        ({"multi_latent_attention": True}, "--sft with --multi-latent-attention"),
        ({"mtp_num_layers": 1}, "--sft with --mtp-num-layers"),
        ({"window_size": (8, 0)}, "--sft with --window-size"),
    ],
)
def test_what_does_not_hold_with_packed_rows(more: dict[str, Any], named: str) -> None:
    assert not faults()
    (line,) = faults(**more)
    assert named in line and "\n" not in line
