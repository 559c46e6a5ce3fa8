"""A program that made its group by the name ``elastic`` gets all that torch documents of it."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import BarrierTimeout, CommError, CommTimeout
from tools.bench._common import Here, Ranks


def begin(here: Here) -> None:
    dist.init_process_group(
        "elastic", store=here.store(), rank=here.rank, world_size=here.size, timeout=timedelta(seconds=30)
    )


def with_a_timeout_of_its_own(here: Here) -> None:
    begin(here)
    short = dist.new_group(timeout=timedelta(seconds=0.3))
    usual = dist.new_group()
    if here.rank == 0:
        began = time.monotonic()
        with pytest.raises(CommTimeout, match=r"timed out after 0.3 s, the timeout here"):
            dist.barrier(short)
        assert time.monotonic() - began < 15
    here.exchange("seen", True, range(here.size))
    dist.barrier(usual)
    dist.destroy_process_group()


def test_the_timeout_given_to_new_group_counts() -> None:
    with Ranks(2, with_a_timeout_of_its_own) as ranks:
        ranks.results(range(2))


def monitored(here: Here) -> str:
    begin(here)
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    said = ""
    if here.rank != 1:
        with pytest.raises(BarrierTimeout) as late:
            dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
        said = str(late.value)
    here.exchange("seen", True, range(here.size))
    dist.destroy_process_group()
    return said


def test_a_monitored_barrier_names_the_rank_that_did_not_come() -> None:
    with Ranks(3, monitored) as ranks:
        said = ranks.results(range(3))
    assert "Rank 1 failed to pass monitoredBarrier in 500 ms" in said[0]
    assert "Rank 2 successfully reached monitoredBarrier, but received errors" in said[2]


def sparse(here: Here) -> None:
    begin(here)
    # Rank r has the entries (0, 0) to (r, r), with rows of two values; the last rank has one entry twice.
    places = [*range(here.rank + 1), *([0] if here.rank == here.size - 1 else [])]
    mine = torch.sparse_coo_tensor(torch.tensor([places, places]), torch.ones(len(places), 2), (4, 4, 2))
    whole = torch.zeros(4, 4, 2)
    for place in range(here.size):
        whole[place, place] = here.size - place + (place == 0)
    total = mine.clone()
    dist.all_reduce(total)
    assert total.is_sparse and torch.equal(total.to_dense(), whole)
    mean = mine.clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, async_op=True).wait()
    assert torch.equal(mean.to_dense(), whole / here.size)
    nothing = torch.zeros(3).to_sparse()
    dist.all_reduce(nothing)
    assert nothing._nnz() == 0
    with pytest.raises(ValueError, match="summed and averaged only"):
        dist.all_reduce(mine.clone(), op=dist.ReduceOp.MAX)
    with pytest.raises(CommError, match="disagree on type or shape"):
        dist.all_reduce(torch.zeros(3 + here.rank).to_sparse())
    dist.barrier()
    dist.destroy_process_group()


def test_sparse_tensors_of_different_lengths_are_summed() -> None:
    with Ranks(3, sparse) as ranks:
        ranks.results(range(3))


def sparse_embedding(here: Here) -> list[float]:
    begin(here)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(6, 2, sparse=True))
    model(torch.tensor([here.rank, 5])).sum().backward()
    grad = model.module.weight.grad
    assert grad is not None and grad.is_sparse
    dist.destroy_process_group()
    return grad.to_dense()[:, 0].tolist()


def test_ddp_reduces_the_sparse_gradients_of_an_embedding() -> None:
    with Ranks(2, sparse_embedding) as ranks:
        found = ranks.results(range(2))
    assert found[0] == found[1] == [0.5, 0.5, 0.0, 0.0, 0.0, 1.0]


def profiled(here: Here) -> list[tuple[str, list[list[int]]]]:
    begin(here)
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3))
        work = dist.all_reduce(torch.ones(2, 2), async_op=True)
        assert work is not None
        work.wait()
        if here.rank == 0:
            dist.send(torch.ones(5), 1)
        else:
            dist.recv(torch.ones(5), 0)
    dist.destroy_process_group()
    events = [event for event in profile.function_events if event.name.startswith("elastic:")]
    assert all(event.is_async for event in events), "they may end in another thread"
    return sorted((event.name, event.input_shapes) for event in events)


def test_profiles_have_operations_with_the_shapes_of_their_inputs() -> None:
    with Ranks(2, profiled) as ranks:
        seen = ranks.results(range(2))
    reductions = [("elastic:all_reduce", [[2, 2]]), ("elastic:all_reduce", [[3]])]
    assert seen[0] == [*reductions, ("elastic:send", [[5]])]
    assert seen[1] == [*reductions, ("elastic:recv", [[5]])]
