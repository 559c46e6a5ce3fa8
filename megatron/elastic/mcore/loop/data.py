"""Megatron's data sets, addressed by sample.

Megatron's samplers yield the samples of a data-parallel rank in sequence. This
module inverts them: it returns the data set index of global sample ``n``. For ``single``
it is ``n`` itself; for ``cyclic`` a permutation of each epoch. Both are pure functions
of the launch's grid, so any rank can read any sample at any time, and a run that lost
ranks reads exactly the samples of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from megatron.elastic.engine.compute.samples import DatasetSource
from megatron.elastic.plan.model import Grid

__all__ = ["cyclic_order", "repeated_order", "sample_order", "sequential_order", "source_for"]


def source_for(dataset: Any, args: Any, grid: Grid) -> DatasetSource | None:
    """Return a sample-addressed source over one of Megatron's data sets, or ``None`` if this rank reads none."""
    if dataset is None:
        return None
    return DatasetSource(dataset, sample_order(dataset, args, grid), workers=args.num_workers)


def sample_order(dataset: Any, args: Any, grid: Grid) -> Callable[[int], int]:
    """Return global sample number → data set index, according to ``--dataloader-type``."""
    if args.dataloader_type == "single":
        return sequential_order(len(dataset))
    if args.dataloader_type == "cyclic":
        return cyclic_order(len(dataset), grid, args.data_sharding)
    raise ValueError(
        f"--dataloader-type {args.dataloader_type} does not address data by sample number: use single or cyclic"
    )


def sequential_order(total: int) -> Callable[[int], int]:
    """Return the order in which sample ``n`` is index ``n``; it raises ``IndexError`` past the end."""

    def order(sample: int) -> int:
        if sample >= total:
            raise IndexError(
                f"the data set is exhausted: it has {total} samples, and sample {sample} is due; lower --train-iters"
            )
        return sample

    return order


def repeated_order(total: int, grid: Grid) -> Callable[[int], int]:
    """Return the order of a set that ``--full-validation`` reads: from its begin again after its last whole wave.

    Raises ``ValueError`` if the set has less than one wave.
    """
    wave = grid.micro_batch_size * grid.data_parallel_size
    active = total - total % wave
    if active <= 0:
        raise ValueError(
            f"--full-validation: a validation set has {total} samples, fewer than --micro-batch-size "
            f"× data-parallel size = {wave}: use more data"
        )
    return lambda sample: sample % active


def cyclic_order(total: int, grid: Grid, sharded: bool) -> Callable[[int], int]:
    """Return the order of Megatron's random sampler: a new permutation each epoch.

    An epoch has whole waves only, on every rank. Without sharding Megatron gives some ranks one batch more of an epoch
    that does not divide, and they then lag behind the others' epochs.

    ``sharded`` (``--no-data-sharding`` off): each data-parallel rank shuffles its
    own contiguous bucket; otherwise one permutation is divided rank by rank.
    """
    wave = grid.micro_batch_size * grid.data_parallel_size
    active = total - total % wave
    if active <= 0:
        raise ValueError(
            f"the data set has {total} samples, fewer than --micro-batch-size "
            f"× data-parallel size = {wave}: use more data"
        )
    bucket = (total // wave) * grid.micro_batch_size

    @lru_cache(maxsize=2)
    def permutation(epoch: int) -> list[int]:
        generator = torch.Generator()
        generator.manual_seed(epoch)
        size = bucket if sharded else (total // grid.micro_batch_size) * grid.micro_batch_size
        indices: list[int] = torch.randperm(size, generator=generator).tolist()
        return indices

    def order(sample: int) -> int:
        epoch, position = divmod(sample, active)
        turn, within = divmod(position, wave)
        rank, row = divmod(within, grid.micro_batch_size)
        nth = turn * grid.micro_batch_size + row
        if sharded:
            return rank * bucket + permutation(epoch)[nth]
        return permutation(epoch)[rank + nth * grid.data_parallel_size]

    return order
