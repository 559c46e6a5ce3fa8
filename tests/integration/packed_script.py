"""``pretrain_gpt.py --sft`` on rows packed of random sequences, without the packages of Megatron's own data set.

Each row has the form that Megatron's ``SFTDataset`` gives it, and follows from its number alone.
"""

from __future__ import annotations

import megatron.elastic.adaptor  # noqa: F401  # first: before anything of Megatron is imported

# isort: split

from itertools import pairwise
from typing import Any

import torch
from megatron.training import get_args
from torch.utils.data import Dataset

import pretrain_gpt
from megatron.elastic.mcore.patching.compat import run

ROWS = 4096


class PackedRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of ``length`` positions, packed of one to five sequences. A third of the tokens has no loss."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self._length, self._vocabulary = length, vocabulary

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(1000 + int(index))
        cuts = torch.randperm(self._length - 1, generator=drawn)[: int(torch.randint(5, (1,), generator=drawn))] + 1
        ends = torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([self._length])])
        tokens = torch.randint(self._vocabulary, (self._length + 1,), generator=drawn)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": (torch.rand(self._length, generator=drawn) > 1 / 3).float(),
            "position_ids": torch.cat([torch.arange(stop - start) for start, stop in pairwise(ends.tolist())]),
            "cu_seqlens": ends.to(torch.int32),
            "max_seqlen": ends.diff().max().to(torch.int32),
        }


def datasets_provider(sample_counts: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Return one set for training, validation and test, on the ranks that read data."""
    args = get_args()
    rows = PackedRows(args.seq_length, args.vocab_size) if pretrain_gpt.reads_data(vp_stage) else None
    return rows, rows, rows


datasets_provider.is_distributed = True  # type: ignore[attr-defined]


if __name__ == "__main__":
    run(datasets_provider, pretrain_gpt.model_provider, pretrain_gpt.forward_step, {})
