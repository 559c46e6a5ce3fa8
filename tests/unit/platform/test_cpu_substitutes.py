"""Substitutes for torch.cuda on a CPU answer truly: one device, the host, with the host's memory and generator."""

from __future__ import annotations

import torch

from megatron.elastic.platform import cpu_substitutes


def test_what_is_made_on_or_moved_to_a_gpu_is_on_the_host() -> None:
    empty = cpu_substitutes.factory_on_cpu(torch.empty)
    assert empty(2, device="cuda:1").device.type == "cpu"
    move = cpu_substitutes.move_to_cpu(torch.Tensor.to)
    assert move(torch.zeros(2), "cuda").device.type == "cpu"
    assert move(torch.zeros(2), torch.float64).dtype == torch.float64
    assert cpu_substitutes.one_device() == 1


def test_memory_is_that_of_this_process_and_machine() -> None:
    free, total = cpu_substitutes.mem_get_info()
    assert 0 < free <= total
    assert 0 < cpu_substitutes.resident_bytes() <= cpu_substitutes.peak_resident_bytes() <= total


def test_the_state_of_a_gpus_generator_is_that_of_the_hosts() -> None:
    before = torch.get_rng_state()
    try:
        cpu_substitutes.manual_seed(7)
        state, drawn = cpu_substitutes.get_rng_state(), torch.rand(3)
        cpu_substitutes.set_rng_state(state)
        assert torch.equal(torch.rand(3), drawn)
    finally:
        torch.set_rng_state(before)
