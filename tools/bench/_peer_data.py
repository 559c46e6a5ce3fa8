"""The samples of a Megatron job, in its order, as a file that programs without Megatron can read.

A script to run in place of ``pretrain_gpt.py``, with the job's own flags and ``PEER_DATA`` set to the file: it builds
the job's dataset, writes 16-bit tokens, and ends. A sample has one token more than its sequence is long: the label of
the last position. Megatron's sampler takes samples by their indices, global batch by global batch.
"""

from __future__ import annotations

import pretrain_gpt  # first: it imports the adaptor before anything of Megatron

# isort: split

import os
from pathlib import Path
from typing import Any

import numpy
from megatron.training import get_args

from megatron.elastic.mcore.patching.compat import run


def write_samples(counts: list[int], vp_stage: int | None = None) -> Any:
    """Build the datasets, write the samples that the job trains on, end the process."""
    args = get_args()
    train, _, _ = pretrain_gpt.datasets_provider(counts, vp_stage)
    used = args.train_iters * args.global_batch_size
    rows = numpy.empty((used, args.seq_length + 1), dtype=numpy.uint16)
    for index in range(used):
        sample = train[index]
        rows[index, :-1], rows[index, -1] = sample["tokens"], sample["labels"][-1]
    path = Path(os.environ["PEER_DATA"])
    partial = path.with_suffix(".partial")
    rows.tofile(partial)
    partial.replace(path)
    raise SystemExit(0)


write_samples.is_distributed = True  # type: ignore[attr-defined]  # Megatron's own convention


if __name__ == "__main__":
    run(write_samples, pretrain_gpt.model_provider, pretrain_gpt.forward_step, {"tokenizer_type": "GPT2BPETokenizer"})
