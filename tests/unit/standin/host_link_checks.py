"""Messages of device memory over host links, each check in a process of its own."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from megatron.elastic._comm import DeviceEvent
from megatron.elastic.comm.errors import GenerationChanged
from megatron.elastic.comm.vendor.enqueued_beside import EnqueuedBeside
from tests.standin import device as standin
from tests.unit.standin.pairs import busy, edit, linked


def check_a_send_does_not_wait_for_the_device() -> None:
    pair = linked()
    free = busy()
    tensor = torch.full((4,), 2.0, device="standin")
    leaving = pair.groups[0].send([tensor], 1, 5)
    tensor.zero_()
    assert not free.query() and not leaving.is_completed(), "the rank can go on launching"
    into = torch.zeros(4, device="standin")
    assert pair.groups[1].recv([into], 0, 5).wait() and leaving.wait(timedelta(seconds=20))
    assert into.tolist() == [2.0] * 4 and standin.unpinned_asynchronous_copies() == 0
    assert leaving.is_completed() and leaving.is_success()


def check_a_send_of_an_older_generation_is_never_begun() -> None:
    """Its tag may be used again by the step that is run once more."""
    pair = linked()
    busy()
    void = pair.groups[0].send([torch.ones(4, device="standin")], 1, 5)
    for fabric in pair.fabrics:
        fabric.interrupt(2)
    with pytest.raises(GenerationChanged):
        void.wait()
    edit(pair.fabrics, 2)
    again = pair.groups[0].send([torch.full((4,), 3.0, device="standin")], 1, 5)
    into = torch.zeros(4, device="standin")
    assert pair.groups[1].recv([into], 0, 5).wait() and again.wait()
    assert into.tolist() == [3.0] * 4


def check_waiting_for_what_runs_beside_orders_streams_and_leaves_the_host_free() -> None:
    side, values = torch.Stream(torch.device("standin", 0)), torch.zeros(4, device="standin")
    with side:
        busy()
        values.fill_(2.0)
        done = DeviceEvent(values.device)
        done.record()
    beside = EnqueuedBeside(done)
    assert not beside.is_completed() and not beside.is_success()
    assert beside.wait() and not beside.is_completed(), "the host did not wait"
    assert values.clone().tolist() == [2.0] * 4, "the stream did"
    assert beside.is_completed() and beside.is_success()


def check_what_ran_on_the_host_is_over() -> None:
    assert EnqueuedBeside(None).wait() and EnqueuedBeside(None).is_completed()
