"""Claims about the stand-in devices, each run in a process of its own (``tests/standin/forked.py``)."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch

from tests.standin import device as standin


def ones(count: int = 4, index: int = 0) -> torch.Tensor:
    return torch.ones(count, device=f"standin:{index}")


# -- memory -----------------------------------------------------------------------------------


def check_a_tensor_keeps_its_values_there_and_back() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        values = torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=dtype)
        assert torch.equal(values.to("standin:2").cpu(), values)
        assert torch.equal(values.t().to("standin:2").t().cpu(), values)


def check_a_parameter_that_moves_to_a_device_stays_the_same_object() -> None:
    """Megatron notes on a parameter what is to happen to its gradient, before its module moves."""
    norm = torch.nn.LayerNorm(4)
    weight = norm.weight
    vars(weight)["sequence_parallel"] = True
    norm.to("standin:2")
    assert norm.weight is weight and "sequence_parallel" in vars(weight)
    assert weight.device.type == "standin" and weight.tolist() == [1.0] * 4


def check_dies_the_host_cannot_read_device_memory() -> None:
    tensor = ones(index=1)
    standin.synchronize(1)
    ctypes.string_at(tensor.data_ptr(), 4)


def check_dies_the_host_cannot_write_device_memory() -> None:
    ctypes.memset(ones(index=3).data_ptr(), 0, 4)


def check_dies_the_host_cannot_read_while_a_kernel_runs() -> None:
    standin.set_lateness(0.0)
    tensor = ones(index=1)
    standin.set_device(1)
    standin._sleep(2_000_000_000)
    ctypes.string_at(tensor.data_ptr(), 4)


def check_memory_is_not_zero_before_it_is_written() -> None:
    assert torch.empty(3, device="standin").isnan().all()
    freed = ones(1000)
    del freed
    assert torch.empty(1000, device="standin").isnan().all()


def check_memory_is_counted_and_bounded() -> None:
    before = standin.memory_allocated()
    held = torch.empty(1 << 20, device="standin")
    assert standin.memory_allocated() - before == 4 << 20 and standin.memory_allocated(1) == 0
    del held
    assert standin.memory_allocated() == before and standin.max_memory_allocated() >= 4 << 20
    assert standin.memory_reserved() >= 4 << 20
    standin.empty_cache()
    assert standin.memory_reserved() == before
    with pytest.raises(torch.OutOfMemoryError, match="device 0 has 4294967296 bytes"):
        torch.empty(5 << 30, device="standin", dtype=torch.uint8)


def check_freed_memory_is_joined_again_before_it_runs_out() -> None:
    parts = [torch.empty(1 << 30, device="standin", dtype=torch.uint8) for _ in range(4)]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device="standin")
    del parts
    assert torch.empty(3 << 30, device="standin", dtype=torch.uint8).numel() == 3 << 30


def check_memory_used_on_another_stream_must_be_recorded() -> None:
    side = standin.Stream()
    for recorded in (True, False):
        first = ones(1000)
        standin.synchronize()
        with standin.stream(side):
            total = first.sum()
        if recorded:
            first.record_stream(side)
        del first
        torch.zeros(1000, device="standin")
        standin.current_stream().synchronize()
        assert (total.item() == 1000) is recorded


# -- devices ----------------------------------------------------------------------------------


def check_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match=r"on the same device.* standin:0 and standin:1"):
        ones() + ones(index=1)
    with pytest.raises(RuntimeError, match=r"on the same device.* standin:0 and cpu"):
        ones() + torch.ones(4)
    assert (ones() + torch.tensor(2.0)).tolist() == [3.0] * 4
    assert ones()[torch.tensor([1, 2])].tolist() == [1.0, 1.0]


def check_the_current_device_belongs_to_a_thread() -> None:
    standin.set_device(3)
    seen: list[torch.device] = []
    thread = threading.Thread(target=lambda: seen.append(torch.empty(1, device="standin").device))
    thread.start()
    thread.join()
    assert torch.empty(1, device="standin").device.index == 3 and seen[0].index == 0


def check_a_process_with_a_device_of_its_own_uses_no_other() -> None:
    from tests.standin.library import checked, library

    checked(library().standin_own(3))
    with pytest.raises(RuntimeError, match=r"works on standin:3 alone, not on standin:0 \(is the current device set"):
        torch.ones(1, device="standin")
    assert standin.get_device_properties(0).total_memory == 4 << 30, "properties can be asked of any device"
    standin.set_device(3)
    assert torch.ones(1, device="standin").device.index == 3
    with pytest.raises(RuntimeError, match="there is no device standin:4"):
        standin.set_device(4)


def check_an_event_is_asked_for_on_threads_with_a_device_of_the_process() -> None:
    from tests.standin.library import checked, library

    checked(library().standin_own(3))
    standin.set_device(3)
    event, found = standin.Event(), list[bool]()
    event.record()

    def ask() -> None:
        for use in (event.query, event.synchronize):
            with pytest.raises(RuntimeError, match="alone, not on standin:0"):
                use()
        with torch.accelerator.device_index(3):
            event.synchronize()
            found.append(event.query())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [True]


def check_an_event_is_freed_on_threads_with_a_device_of_the_process() -> None:
    from tests.standin.library import checked, library

    checked(library().standin_own(3))
    standin.set_device(3)
    held = [standin.Event()]
    held[0].record()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match=r"an event was freed.*alone, not on standin:0"):
        standin.synchronize()


def check_a_backward_concerns_the_device_of_its_tensors_alone() -> None:
    from tests.standin.library import checked, library

    checked(library().standin_own(3))
    standin.set_device(3)
    leaf = torch.ones(4, device="standin", requires_grad=True)
    (leaf * leaf).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [2.0] * 4


def check_a_copy_between_devices_waits_for_both() -> None:
    source, target = ones(), torch.zeros(4, device="standin:2")
    source.mul_(3)
    target.add_(1)
    target.copy_(source)
    source.zero_()
    assert target.tolist() == [3.0] * 4


def check_the_device_is_not_inherited_by_a_fork() -> None:
    ones()
    child = os.fork()
    if child == 0:
        with pytest.raises(RuntimeError, match="used before this process was forked"):
            ones()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# -- streams and events -----------------------------------------------------------------------


def check_an_asynchronous_copy_to_the_host_is_not_there_before_it_is_waited_for() -> None:
    target = torch.zeros(4).pin_memory()
    target.copy_(ones(), non_blocking=True)
    assert target.tolist() == [0.0] * 4, "a read without a synchronisation sees the old values, each time"
    standin.current_stream().synchronize()
    assert target.tolist() == [1.0] * 4
    assert standin.unpinned_asynchronous_copies() == 0


def check_an_asynchronous_copy_to_the_device_reads_the_host_late() -> None:
    source = torch.ones(4).pin_memory()
    target = source.to("standin", non_blocking=True)
    source.fill_(5)
    assert target.tolist() == [5.0] * 4


def check_a_copy_of_pageable_memory_is_not_asynchronous_and_is_counted() -> None:
    source = torch.ones(4)
    target = source.to("standin", non_blocking=True)
    source.fill_(5)
    back = torch.zeros(4)
    back.copy_(target, non_blocking=True)
    assert back.tolist() == [1.0] * 4 and standin.unpinned_asynchronous_copies() == 2


def check_pinned_memory_outlives_the_copy_that_reads_it() -> None:
    source = torch.full((1000,), 3.0).pin_memory()
    target = source.to("standin", non_blocking=True)
    del source
    reused = torch.zeros(1000).pin_memory()
    assert target.sum().item() == 3000 and reused.sum() == 0


def check_a_stream_that_does_not_wait_for_another_reads_too_early() -> None:
    side, first = standin.Stream(), torch.zeros(4, device="standin")
    standin.synchronize()
    for waits in (False, True):
        first.add_(1)
        if waits:
            side.wait_stream(standin.current_stream())
        with standin.stream(side):
            seen = first.clone()
            side.synchronize()
            assert (seen.tolist() == [2.0] * 4) is waits
            seen.record_stream(standin.current_stream())


def check_a_full_stream_makes_room_for_a_thread_that_holds_the_interpreters_lock() -> None:
    """As torch.Stream.wait_stream does, here behind copies of memory that Python has too."""
    side, target = torch.Stream("standin"), torch.zeros(4, device="standin")
    for source in [torch.ones(4).pin_memory() for _ in range(1500)]:  # more than a stream holds
        target.copy_(source, non_blocking=True)
        for _ in range(2):  # so that room for one of them is that of a copy
            side.wait_stream(torch.accelerator.current_stream())
    assert target.tolist() == [1.0] * 4


def check_an_event_is_reached_when_its_stream_is() -> None:
    begin, end = standin.Event(enable_timing=True), standin.Event(enable_timing=True)
    begin.record()
    standin._sleep(30_000_000)
    end.record()
    assert not end.query()
    end.synchronize()
    assert end.query() and begin.elapsed_time(end) >= 30


def check_an_event_takes_streams_of_its_own_kind() -> None:
    """Those of torch wait for one another."""
    own, general = standin.current_stream(), torch.accelerator.current_stream()
    for use in (standin.Event().record, standin.Event().wait):
        use(own)
        with pytest.raises(TypeError, match=r"events of torch\.standin take its own streams"):
            use(general)  # type: ignore[arg-type]
    side = standin.Stream()
    standin._sleep(1)
    side.wait_stream(general)
    side.wait_event(general.record_event())
    general.wait_stream(side)


def check_work_is_done_in_time_where_lateness_is_a_time() -> None:
    standin.set_lateness(0.05)
    done, target = standin.Event(), torch.zeros(1).pin_memory()
    target.copy_(ones(1), non_blocking=True)
    done.record()
    assert target.item() == 0
    while not done.query():
        pass
    assert target.item() == 1


def check_an_error_of_a_kernel_is_reported_by_the_wait_and_lasts() -> None:
    picked = ones(3)[torch.tensor([7], device="standin")]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a kernel failed earlier: index 7 is out of bounds"):
            picked.item()
    assert ones(index=1).sum().item() == 4, "other devices go on"


# -- random numbers ---------------------------------------------------------------------------


def check_random_numbers_follow_the_calls_not_the_execution() -> None:
    standin.manual_seed(3)
    state = standin.get_rng_state()
    side = standin.Stream()
    first = torch.rand(5, device="standin")
    with standin.stream(side):
        second = torch.rand(5, device="standin")
        side.synchronize()
    late = second.tolist(), first.tolist()
    standin.set_rng_state(state)
    assert (torch.rand(5, device="standin").tolist(), torch.rand(5, device="standin").tolist()) == late[::-1]
    assert late[0] != late[1]
    kept = torch.nn.functional.dropout(torch.ones(10000, device="standin"), 0.25)
    assert 0.73 < (kept > 0).float().mean().item() < 0.77 and kept.max().item() == pytest.approx(4 / 3)


def check_generators_belong_to_devices() -> None:
    standin.manual_seed_all(5)
    assert torch.rand(3, device="standin:0").tolist() == torch.rand(3, device="standin:1").tolist()
    own = torch.Generator("standin:1").manual_seed(5)
    torch.rand(3, device="standin:1", generator=own)
    assert standin.default_generators[0].get_state().tolist() == standin.default_generators[1].get_state().tolist()


# -- kernels ----------------------------------------------------------------------------------


def transformer_steps(device: str) -> tuple[list[float], list[list[float]]]:
    """Losses of three steps, and the last gradients, of a network with the operators of a GPT, in bf16 and fp32."""
    torch.manual_seed(1)
    layers = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(11, 8),
            "norm": torch.nn.LayerNorm(8),
            "query": torch.nn.Linear(8, 24),
            "out": torch.nn.Linear(8, 11, bias=False),
        }
    ).to(device)
    tokens = torch.arange(12).view(2, 6).remainder(11).to(device)
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.1, foreach=False)
    losses = []
    for _ in range(3):
        hidden = layers["norm"](layers["embedding"](tokens))
        q, k, v = layers["query"](hidden).bfloat16().chunk(3, dim=-1)
        scores = torch.baddbmm(torch.zeros(2, 6, 6, device=device, dtype=q.dtype), q, k.transpose(1, 2), alpha=0.3)
        masked = scores.masked_fill(torch.ones(6, 6, device=device).triu(1).bool(), -10000.0)
        mixed = torch.bmm(torch.softmax(masked.float(), -1).bfloat16(), v).float()
        logits = layers["out"](torch.nn.functional.gelu(mixed) + hidden)
        loss = torch.nn.functional.cross_entropy(logits.view(-1, 11), tokens.roll(1, 1).reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad.flatten().tolist() for p in layers.parameters() if p.grad is not None]


def check_a_network_learns_as_on_the_cpu_and_never_waits() -> None:
    (losses, gradients), (expected, others) = transformer_steps("standin:1"), transformer_steps("cpu")
    assert losses == pytest.approx(expected, rel=1e-6)
    for gradient, other in zip(gradients, others, strict=True):
        assert gradient == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert standin.waiting_operators() == []


def check_a_layer_norm_in_16_bits_has_a_backward() -> None:
    values = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    gradients = []
    for device in ("standin", "cpu"):
        norm = torch.nn.LayerNorm(8, dtype=torch.bfloat16).to(device)
        norm(values.to(device)).square().sum().backward()
        gradients.append([parameter.grad.float().cpu() for parameter in norm.parameters()])  # type: ignore[union-attr]
    for there, here in zip(*gradients, strict=True):
        assert torch.allclose(there, here, rtol=0.02, atol=0.05)


def check_a_shape_that_depends_on_values_is_waited_for() -> None:
    assert torch.nonzero(torch.tensor([0, 1, 1], device="standin")).tolist() == [[1], [2]]
    assert standin.waiting_operators() == ["aten::nonzero"]


def check_a_number_of_the_host_is_taken_at_the_call() -> None:
    number = torch.tensor(2.0)
    product = ones() * number
    number.fill_(9)
    assert product.tolist() == [2.0] * 4


def check_outputs_and_views_are_shaped_at_the_call() -> None:
    into = torch.empty(0, device="standin")
    torch.add(ones(3), 1, out=into)
    assert into.tolist() == [2.0] * 3
    square = torch.arange(12.0, device="standin").view(3, 4)
    assert square.t()[1:3].tolist() == torch.arange(12.0).view(3, 4).t()[1:3].tolist()
    assert square.unfold(1, 2, 2).tolist() == torch.arange(12.0).view(3, 4).unfold(1, 2, 2).tolist()
    values, indices = square.max(dim=0)
    assert (values.tolist(), indices.tolist()) == ([8.0, 9.0, 10.0, 11.0], [2, 2, 2, 2])
    assert [part.tolist() for part in torch.split(square[0], [1, 3])] == [[0.0], [1.0, 2.0, 3.0]]
    storage = ones(2).untyped_storage()
    storage.resize_(16)
    assert storage.nbytes() == 16
