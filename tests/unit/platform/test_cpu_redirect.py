"""torch.cuda on a machine without CUDA: every name with its reason, true answers, all undone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.elastic.platform import cpu_redirect
from megatron.elastic.platform.cpu_redirect import ROWS, Redirection, describe
from megatron.elastic.platform.type_names import TypeName

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def redirected() -> Iterator[Redirection]:
    redirection = Redirection()
    redirection.apply()
    yield redirection
    redirection.undo()


def snapshot() -> dict[str, object]:
    """Every name of the table → the object it is now (by identity), absent ones left out."""
    return {f"{row.owner}.{name}": vars(row.target()).get(name, None) for row in ROWS for name in row.names}


def in_a_process_of_its_own(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_undo_restores_every_object() -> None:
    before = snapshot()
    redirection = Redirection()
    redirection.apply()
    assert any(snapshot()[name] is not before[name] for name in before)
    redirection.undo()
    after = snapshot()
    assert [name for name in before if after[name] is not before[name]] == []
    redirection.undo()


def test_every_redirected_name_has_a_reason() -> None:
    rows = list(describe())
    assert len({name for name, _ in rows}) == len(rows) > 80
    assert all(len(reason) > 10 for _, reason in rows)


def test_nothing_pretends_that_a_gpu_exists(redirected: Redirection) -> None:
    assert torch.cuda.is_available() is False
    assert torch.cuda.get_device_capability() == (0, 0)


def test_a_torch_with_cuda_that_counts_devices_instead_of_asking_the_driver_sees_none(
    redirected: Redirection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in workers, which are forked from a process that must not start the driver."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    assert torch.cuda.device_count() == 1 and torch.cuda.is_available() is False


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), 0])
def test_tensors_asked_for_on_cuda_live_on_the_cpu(redirected: Redirection, device: Any) -> None:
    made = [
        torch.zeros(3, device=device),
        torch.tensor([1.0], device=device),
        torch.empty_like(torch.ones(2), device=device),
        torch.ones(2).new_full((2,), 1.0, device=device),
        torch.ones(2).to(device),
        torch.ones(2).cuda(),
        torch.ones(2).pin_memory(),
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_moving_a_tensor_still_casts_and_copies(redirected: Redirection) -> None:
    source = torch.ones(2)
    assert source.to("cuda", torch.float64).dtype is torch.float64
    assert source.to(torch.bfloat16).dtype is torch.bfloat16
    assert source.to("cuda") is source
    copied = source.to("cuda", copy=True)
    copied += 1
    assert source.tolist() == [1.0, 1.0]


def test_a_module_moves_to_cuda_without_leaving(redirected: Redirection) -> None:
    module = torch.nn.Linear(2, 2).cuda().to("cuda:0").to(device="cuda", dtype=torch.float64)
    assert module.weight.device.type == "cpu" and module.weight.dtype is torch.float64


def test_type_names_equal_their_cuda_twins_both_ways(redirected: Redirection) -> None:
    name = torch.zeros(1, dtype=torch.bfloat16).type()
    assert name == "torch.cuda.BFloat16Tensor" and "torch.cuda.BFloat16Tensor" == name  # noqa: SIM300 - both ways
    assert name in ["torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor"]
    assert name == "torch.BFloat16Tensor" and name != "torch.cuda.FloatTensor"
    assert torch.zeros(1).type("torch.cuda.DoubleTensor").dtype is torch.float64
    assert hash(TypeName("torch.FloatTensor")) == hash("torch.FloatTensor")


def test_there_is_one_generator(redirected: Redirection) -> None:
    torch.cuda.manual_seed(7)
    first = torch.rand(3)
    state = torch.cuda.get_rng_state()
    torch.rand(5)
    torch.cuda.set_rng_state(state)
    again = torch.rand(2)
    torch.default_generator.manual_seed(7)
    assert torch.equal(first, torch.rand(3)) and torch.equal(again, torch.rand(2))
    assert torch.cuda.default_generators[torch.cuda.current_device()] is torch.default_generator


def test_memory_figures_are_this_process(redirected: Redirection) -> None:
    before = torch.cuda.memory_allocated()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    grown = torch.cuda.memory_allocated() - before
    assert grown > 32 << 20, f"{block.numel()} bytes touched, {grown} seen"
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] > 0
    assert stats["num_alloc_retries"] == 0


def test_events_measure_time(redirected: Redirection) -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    sum(range(200_000))
    with torch.cuda.stream(torch.cuda.Stream()):
        end.record(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_event(end)
    assert end.query() and start.elapsed_time(end) > 0
    assert end.elapsed_time(start) < 0


def test_compile_is_the_identity_in_every_form(redirected: Redirection) -> None:
    def function(x: int) -> int:
        return x + 1

    assert torch.compile(function) is function
    assert torch.compile(dynamic=True)(function) is function


def test_an_optimizer_steps_and_keeps_the_gradient_mode(redirected: Redirection) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.zero_grad()
    left: Any = weight.grad
    assert torch.is_grad_enabled() and left is None and float(weight[0].detach()) < 1.0


def test_a_loader_does_not_pin(redirected: Redirection) -> None:
    numbers: Any = [1, 2, 3]
    loader: Any = torch.utils.data.DataLoader(numbers, pin_memory=True)
    assert isinstance(loader, torch.utils.data.DataLoader) and loader.pin_memory is False
    assert [int(item) for item in loader] == [1, 2, 3]


def test_a_cuda_generator_is_a_generator(redirected: Redirection) -> None:
    generator = torch.Generator(device="cuda")
    assert isinstance(generator, torch.Generator) and generator.device.type == "cpu"
    generator.manual_seed(3)
    assert torch.rand(2, generator=generator).shape == (2,)


def test_installing_twice_is_installing_once_and_dynamo_stays_away() -> None:
    done = in_a_process_of_its_own(
        "import sys, torch\n"
        "from megatron.elastic.platform.cpu_redirect import install, installed\n"
        "first = install()\n"
        "assert install() is first is installed()\n"
        "weight = torch.nn.Parameter(torch.ones(2)); weight.grad = torch.ones(2)\n"
        "optimizer = torch.optim.Adam([weight]); optimizer.step(); optimizer.zero_grad()\n"
        "import megatron.core\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "first.undo()\n"
        "assert installed() is None\n"
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_dynamo_can_still_be_imported() -> None:
    """It maps function objects to rules and asserts that none occurs under two names."""
    done = in_a_process_of_its_own(
        "from megatron.elastic.platform.cpu_redirect import install\ninstall()\nimport torch._dynamo\n"
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_after_megatron_it_is_too_late_and_says_what_to_do() -> None:
    done = in_a_process_of_its_own(
        "import sys, types\n"
        "sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "from megatron.elastic.platform.cpu_redirect import RedirectionTooLate, install\n"
        "try:\n    install()\n"
        "except RedirectionTooLate as error:\n    print(error)\n"
    )
    assert "import megatron.elastic.adaptor" in done.stdout, done.stderr[-2000:]


def test_the_table_names_only_what_this_torch_has() -> None:
    gone = [f"{row.owner}.{name}" for row in ROWS for name in row.names if not hasattr(row.target(), name)]
    known = {"torch.cuda.reset_max_memory_allocated"}  # older torch only
    assert set(gone) <= known, f"look at {sorted(set(gone) - known)}"
    assert cpu_redirect.resolve("torch.nn.Module") is torch.nn.Module
