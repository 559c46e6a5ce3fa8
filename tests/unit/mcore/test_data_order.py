"""Samples addressed by number are those that Megatron's own samplers give to each data-parallel rank."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler, MegatronPretrainingSampler
from megatron.training.training import cyclic_iter

from megatron.elastic.engine.compute.samples import StepAddress
from megatron.elastic.mcore.loop.data import cyclic_order, repeated_order, sample_order, sequential_order, source_for
from megatron.elastic.plan.model import Grid, Piece


@settings(max_examples=100, deadline=None)
@given(
    total=st.integers(1, 200),
    micro=st.integers(1, 4),
    ranks=st.integers(1, 5),
    sharded=st.booleans(),
    begun=st.integers(0, 20),
    waves=st.integers(1, 20),
)
def test_the_cyclic_order_is_that_of_megatrons_random_sampler(
    total: int, micro: int, ranks: int, sharded: bool, begun: int, waves: int
) -> None:
    wave = micro * ranks
    grid = Grid(wave, micro, ranks)
    if total < wave:
        with pytest.raises(ValueError, match=f"has {total} samples, fewer than .* = {wave}"):
            cyclic_order(total, grid, sharded)
        return
    order = cyclic_order(total, grid, sharded)
    for rank in range(ranks):
        theirs: list[list[int]] = []
        consumed = begun * wave
        while len(theirs) < waves:  # one iterator an epoch
            sampler = MegatronPretrainingRandomSampler([0] * total, total, consumed, micro, rank, ranks, sharded)
            left = total // wave - consumed // wave % (total // wave)  # some ranks would get one batch more
            batches = list(islice(sampler, min(left, waves - len(theirs))))
            theirs += batches
            consumed += len(batches) * wave
        for number, batch in enumerate(theirs):
            first = (begun + number) * wave + rank * micro
            assert [order(first + row) for row in range(micro)] == batch


@given(micro=st.integers(1, 4), ranks=st.integers(1, 5), waves=st.integers(1, 10), begun=st.integers(0, 9))
def test_the_sequential_order_is_that_of_megatrons_sampler(micro: int, ranks: int, waves: int, begun: int) -> None:
    wave, total = micro * ranks, micro * ranks * (waves + begun)
    order = sequential_order(total)
    for rank in range(ranks):
        for number, batch in enumerate(MegatronPretrainingSampler(total, begun * wave, micro, rank, ranks)):
            first = (begun + number) * wave + rank * micro
            assert [order(first + row) for row in range(micro)] == batch
    with pytest.raises(IndexError, match=rf"has {total} samples, and sample {total} is due"):
        order(total)


@given(total=st.integers(1, 60), micro=st.integers(1, 4), ranks=st.integers(1, 5), batches=st.integers(1, 40))
def test_a_set_that_is_read_in_full_is_repeated_as_megatron_repeats_it(
    total: int, micro: int, ranks: int, batches: int
) -> None:
    wave = micro * ranks
    grid = Grid(wave, micro, ranks)
    if total < wave:
        with pytest.raises(ValueError, match=f"has {total} samples, fewer than .* = {wave}"):
            repeated_order(total, grid)
        return
    order = repeated_order(total, grid)
    for rank in range(ranks):
        theirs = cyclic_iter(MegatronPretrainingSampler(total, 0, micro, rank, ranks))
        for number, batch in enumerate(islice(theirs, batches)):
            first = number * wave + rank * micro
            assert [order(first + row) for row in range(micro)] == batch


def test_a_source_reads_the_data_set_in_the_order_of_its_flag() -> None:
    grid = Grid(2, 1, 2)
    args = SimpleNamespace(dataloader_type="single", data_sharding=True, num_workers=0)
    assert source_for(None, args, grid) is None, "this rank reads no data"
    source = source_for([{"text": number} for number in range(10, 20)], args, grid)
    assert source is not None
    batch = source.begin(StepAddress(6, 2))(Piece(0, 0, 0, 3, (0, 1)))
    assert next(batch)["text"].tolist() == [16, 17] and batch.reading is not None and batch.reading.samples == (6, 7)
    args.dataloader_type = "cyclic"
    shuffled = sample_order(range(10), args, grid)
    assert sorted(shuffled(sample) for sample in range(10)) == list(range(10))
    args.dataloader_type = "external"
    with pytest.raises(ValueError, match=r"external .* use single or cyclic"):
        sample_order(range(10), args, grid)
