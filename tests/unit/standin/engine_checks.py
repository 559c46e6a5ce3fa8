"""Parts of the engine on the stand-in devices, each check in a process of its own (``tests/standin/forked.py``)."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm.vendor.host_staging import through_host
from megatron.elastic.comm.vendor.outbox import Outbox
from megatron.elastic.comm.vendor.selection import vendor_of
from megatron.elastic.comm.vendor.staged_message import received, sent
from megatron.elastic.engine.compute.dropout import DropoutKey, _Mask
from megatron.elastic.engine.compute.exact_gradients import ExactGradients, resolutions
from megatron.elastic.platform.own_device import use_own_device
from megatron.elastic.platform.select import select
from tests.standin import device as standin
from tests.standin import redirect
from tests.standin.platform import StandinPlatform

STANDIN = "tests.standin.platform:StandinPlatform"


class Link(dist.Work):
    """The work of a host link: done at the wait, when ``arrives`` is in ``into``."""

    def __init__(self, into: torch.Tensor, arrives: torch.Tensor | None = None) -> None:
        super().__init__()
        self.into, self.arrives = into, arrives

    def wait(self, timeout: Any = None) -> bool:
        if self.arrives is not None:
            self.into.copy_(self.arrives)
        return True


# -- the platform -----------------------------------------------------------------------------


def check_the_platform_has_streams_memory_and_seeds() -> None:
    platform = select(STANDIN)
    assert platform.device_count() == 4 and platform.device(2) == torch.device("standin:2")
    platform.set_device(2)
    platform.seed(3)
    state = platform.rng_state()
    first = torch.rand(4, device="standin").tolist()
    platform.set_rng_state(state)
    side = platform.new_stream()
    with platform.use_stream(side):
        event = platform.new_event(timing=True)
        again = torch.rand(4, device="standin")
        event.record(side)
    platform.current_stream().wait_event(event)
    assert again.tolist() == first
    memory = platform.memory(2)
    assert 0 < memory.used <= memory.peak < memory.total == 4 << 30
    assert platform.pin(torch.ones(2)).is_pinned() and "4 × stand-in accelerator 0" in platform.describe()
    platform.synchronize()


def check_cuda_is_redirected_as_for_ascend() -> None:
    StandinPlatform().prepare()
    torch.cuda.set_device(1)
    made = [
        torch.zeros(2, device="cuda"),
        torch.zeros(2, device=1),
        torch.tensor([1.0], device=torch.device("cuda")),
        torch.ones(2).cuda(),
        torch.ones(2).to("cuda:1"),
        torch.ones(2).to(torch.cuda.current_device()),
        torch.ones(2).new_zeros(2, device="cuda"),
        torch.nn.Linear(2, 2).cuda().weight,
        torch.nn.Linear(2, 2).to(device="cuda").weight,
    ]
    assert {str(tensor.device) for tensor in made} == {"standin:1"} and all(tensor.is_cuda for tensor in made)
    assert torch.cuda.is_available() and torch.cuda.device_count() == 4
    torch.cuda.manual_seed(5)
    state = torch.cuda.random.get_rng_state(device=torch.device("cuda"))
    drawn = torch.rand(3, device="cuda").tolist()
    torch.cuda.set_rng_state(state)
    assert torch.rand(3, device="cuda").tolist() == drawn
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    torch.cuda.current_stream().wait_event(event)
    torch.cuda.synchronize()
    assert event.query() and torch.compile(abs) is abs
    assert torch.Generator(device="cuda").device.type == "standin"
    redirect.install()


def check_a_rank_works_on_the_device_of_its_local_rank() -> None:
    os.environ.update(LOCAL_RANK="3", STANDIN_OWN="local")
    platform = StandinPlatform()
    with pytest.raises(RuntimeError, match="standin:3 alone, not on standin:0"):
        torch.ones(1, device="standin")
    use_own_device(platform)
    assert torch.ones(1, device="standin").device.index == 3
    vendor = vendor_of(platform, dist.HashStore())
    assert vendor.device == torch.device("standin:3") and vendor.device_name.endswith("standin3")
    assert not vendor.communicator(0).takes(torch.ones(1, device="standin"))


# -- tensors over host links ------------------------------------------------------------------


def check_staging_reads_finished_values_and_returns_written_ones() -> None:
    source, output = torch.ones(4, device="standin") * 3, torch.zeros(2, device="standin")

    def act(read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        assert read[0].tolist() == [3.0] * 4 and read[0].is_pinned()
        written[0][0] = 7

    through_host([source], [output], act)
    assert output.tolist() == [7.0, 0.0] and standin.unpinned_asynchronous_copies() == 0


def check_a_message_is_sent_as_it_was_and_received_at_the_wait() -> None:
    tensor, seen = torch.ones(4, device="standin") * 2, []

    def move(host: torch.Tensor) -> dist.Work:
        seen.append(host)
        return Link(host)

    work = sent(tensor, move, Outbox(tensor.device), 0)
    tensor.zero_()
    standin.synchronize()
    assert work.wait() and seen[0].tolist() == [2.0] * 4
    into = torch.zeros(4, 2, device="standin")[:, 0]
    arriving = received(into, lambda host: Link(host, torch.full((4,), 6.0)))
    assert into.tolist() == [0.0] * 4
    for _ in range(2):
        assert arriving.wait() and into.tolist() == [6.0] * 4
        into.fill_(6)
    assert standin.unpinned_asynchronous_copies() == 0


# -- computation ------------------------------------------------------------------------------


def check_dropout_masks_are_those_of_the_host() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        mask = _Mask(DropoutKey(-3, 5, (7, 1 << 40, 9)), 0.3, 2, 1, sample_dim=1, extent=(9, 130), offset=(4, 65))
        x, residual = torch.randn(5, 3, 65).to(dtype), torch.randn(5, 3, 65).to(dtype)
        for added in (None, residual):
            there = mask.apply(x.to("standin"), None if added is None else added.to("standin"))
            assert there.device.type == "standin" and torch.equal(there.cpu(), mask.apply(x, added))
    assert standin.waiting_operators() == []


def exact_sum(device: str) -> tuple[list[float], list[int]]:
    """The exact sum of gradients of two parameters of an arena on ``device``, and the integers it was added from."""
    made = torch.Generator().manual_seed(1)
    gradients = torch.zeros(50, device=device)
    arena = SimpleNamespace(
        gradients=gradients,
        device=gradients.device,
        slices={},
        has_local=False,
        places=lambda: [(0, 10), (10, 20), (20, 50)],
        place_of=lambda unit, name: (10, 20),
        gradient_views=dict,
        hand_over=lambda receiver: None,
    )
    exact = ExactGradients(cast(Any, arena), 3)
    exact.begin(resolutions(1.0)[0])
    for _ in range(3):
        exact.add(20, torch.randn(30, generator=made).to(device))
    exact.contribute(0, "shared", torch.randn(10, generator=made).to(device))
    exact.views()
    exact.total(0, 50)
    return gradients.tolist(), exact.sums(0, 50).tolist()


def check_exact_sums_of_device_gradients_have_the_bits_of_the_hosts() -> None:
    assert exact_sum("standin:1") == exact_sum("cpu")
