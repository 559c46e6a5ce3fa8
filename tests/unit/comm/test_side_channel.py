"""Data in the background is never far ahead of its receiver on the link that steps use, and arrives whole."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.comm.gloo.fabric import GlooFabric
from megatron.elastic.comm.gloo.side_channel import GlooSideChannel
from megatron.elastic.comm.side_channel import PIECE_BYTES
from tests.unit.comm.fabric_checks import same, values
from tests.unit.comm.test_fabric_contract import KINDS, run
from tools.bench._common import Here

ELEMENTS = 1 << 20
STEP_TAG, MESSAGES = 5, 100


def payload(salt: int) -> torch.Tensor:
    return values(0, ELEMENTS, torch.float32, salt)


def one_piece_at_a_time(here: Here, fabric: Fabric) -> None:
    """Rank 0 streams to rank 1, which takes nothing in until a message of a step has passed."""
    channel = fabric.side_channel(1)
    if here.rank == 0:
        stream = threading.Thread(target=channel.send, args=(1, payload(1)))
        stream.start()
        while channel.under_way(1) == 0:
            time.sleep(0.001)
        dist.send(torch.ones(8), dst=1, tag=STEP_TAG)
        assert channel.under_way(1) == 1 and stream.is_alive(), "more was handed over than has been confirmed"
        stream.join()
        channel.drain(1)
        assert channel.under_way(1) == 0
    elif here.rank == 1:
        got, passed = torch.empty(ELEMENTS), torch.zeros(8)
        dist.recv(passed, src=0, tag=STEP_TAG)
        channel.recv(0, got)
        same(got, payload(1), "what was streamed")


def many_where_everybody_waits(here: Here, fabric: Fabric) -> None:
    """Both ways at once, long and short messages; hurried half-way, as at a boundary."""
    channel, peer = fabric.side_channel(2), here.rank ^ 1

    def receive() -> None:
        for salt in range(4):
            got = torch.empty(ELEMENTS if salt % 2 else 100)
            channel.recv(peer, got)
            same(got, values(peer, got.numel(), torch.float32, salt), salt)
        received.append(True)

    received: list[bool] = []
    thread = threading.Thread(target=receive)
    thread.start()
    for salt in range(4):
        if salt == 2:
            channel.hurry()
        channel.send(peer, values(here.rank, ELEMENTS if salt % 2 else 100, torch.float32, salt))
    channel.drain(peer)
    thread.join()
    assert received, "the receiving thread failed"


def beside_a_thread_that_looks_instead_of_waiting(here: Here, fabric: Fabric) -> None:
    """A look for a message takes in others with the interpreter's lock held.

    Meanwhile memory of streams, that of Python objects, is given back.
    """
    channel, peer, passed = fabric.side_channel(3), here.rank ^ 1, torch.zeros(8)

    def send() -> None:
        for salt in range(MESSAGES):
            channel.send(peer, torch.full((PIECE_BYTES,), float(salt)))
        channel.drain(peer)
        dist.send(torch.ones(8), dst=peer, tag=STEP_TAG)

    def receive() -> None:
        for salt in range(MESSAGES):
            got = torch.empty(PIECE_BYTES)
            channel.recv(peer, got)
            assert bool((got == salt).all())
        received.append(True)

    received: list[bool] = []
    threads = [threading.Thread(target=body) for body in (send, receive)]
    for thread in threads:
        thread.start()
    work = dist.irecv(passed, src=peer, tag=STEP_TAG)
    assert work is not None
    while not work.is_completed():
        time.sleep(0)
    for thread in threads:
        thread.join()
    assert received and bool((passed == 1).all())


def given_up(here: Here, fabric: Fabric) -> None:
    """A channel that was given up moves nothing more; other channels and the steps go on."""
    channel, peer = fabric.side_channel(4), here.rank ^ 1
    assert isinstance(fabric, GlooFabric) == isinstance(channel, GlooSideChannel)
    channel.give_up()
    with pytest.raises(CommError):
        channel.send(peer, payload(9))
    with pytest.raises(CommError):
        channel.recv(peer, torch.empty(ELEMENTS))
    dist.barrier()


def all_of_it(here: Here, fabric: Fabric) -> None:
    one_piece_at_a_time(here, fabric)
    many_where_everybody_waits(here, fabric)
    if not isinstance(fabric, GlooFabric):  # whose messages cannot be looked at
        beside_a_thread_that_looks_instead_of_waiting(here, fabric)
    given_up(here, fabric)


@pytest.mark.parametrize("kind", KINDS)
def test_what_streams_beside_steps_keeps_out_of_their_way(kind: str) -> None:
    run(kind, all_of_it)
