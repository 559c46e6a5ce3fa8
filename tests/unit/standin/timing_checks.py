"""Times of pieces are the device's, not the host's, each check in a process of its own."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron.elastic.engine.compute.device_numbers import on_device
from megatron.elastic.engine.compute.dropout import DropoutKey, _Mask
from megatron.elastic.engine.compute.executor import Executor, PassResult
from megatron.elastic.engine.compute.piece_times import clock_of
from megatron.elastic.engine.generation.hardware import survey
from megatron.elastic.engine.inject import Injector, parse
from tests.standin import device as standin
from tests.standin.platform import StandinPlatform
from tests.unit.engine.test_executor import LENGTH, ROWS, UNITS, WIDTH, Layers, Nowhere, plan, work
from tests.unit.standin.pairs import NAP, linked


def layers_on_device() -> tuple[Layers, Executor]:
    """Layers on the device, and what computes them in several pieces."""
    interface = Layers(layers=[torch.nn.Linear(WIDTH, WIDTH).to("standin") for _ in range(UNITS)])
    interface.batch = torch.randn(LENGTH, ROWS, WIDTH).to("standin")
    found, device, clock = plan(0, UNITS), torch.device("standin", 0), clock_of(StandinPlatform())
    return interface, Executor(
        interface,  # type: ignore[arg-type]
        Nowhere(),
        found,
        found.cells[0],
        0,
        lambda *_: None,
        device,
        clock,
    )


def slow_pass(**change: Any) -> PassResult:
    """One pass whose first forward keeps the device busy for ``NAP``."""
    standin.set_lateness(0.0)
    interface, execute = layers_on_device()
    forward = interface.forward
    slept: list[bool] = []

    def first(*given: Any) -> Any:
        output = forward(*given)
        if not slept:
            slept.append(True)
            standin._sleep(NAP)
        return output

    interface.forward = first  # type: ignore[assignment, method-assign]
    return execute.run(replace(work(), **change))


def check_pieces_are_timed_by_the_device_and_not_by_their_launches() -> None:
    measured = slow_pass().measured.read()
    spent = [one.end_ns - one.start_ns for one in measured]
    assert spent[0] >= NAP and max(spent[1:]) < NAP
    starts = [one.start_ns for one in measured]
    assert starts == sorted(starts), "in the order of the work"


def flag() -> torch.Tensor:
    """A number of the host that the device sets when it comes here; it comes no further than the host waits for."""
    found = torch.zeros(1).pin_memory()
    found.copy_(torch.ones(1, device="standin"), non_blocking=True)
    return found


def check_the_host_launches_a_whole_pass_before_its_device_has_computed_the_first_piece() -> None:
    """Each micro-batch would begin late if the host read the loss of the one before."""
    flags: list[torch.Tensor] = []
    ahead: list[bool] = []

    def between() -> None:
        flags.append(flag())
        ahead.append(flags[0].item() == 0)

    result = layers_on_device()[1].run(replace(work(), between=between))
    assert len(ahead) > 4 and all(ahead), ahead
    assert flags[0].item() == 1 and result.tokens > 0 and result.report["loss"][1] > 1


def check_numbers_for_kernels_and_dropout_do_not_wait_for_the_device() -> None:
    mask = _Mask(DropoutKey(3, 5, (7, 9)), 0.3, 2, 1, sample_dim=1, extent=(4, 8), offset=(0, 0))
    x = torch.ones(4, 2, 8, device="standin")
    standin.synchronize()
    behind = flag()
    numbers, dropped = on_device((3, 1, 2), x.device), mask.apply(x, None)
    assert behind.item() == 0, "the host did not wait"
    assert numbers.tolist() == [3, 1, 2] and torch.equal(dropped.cpu(), mask.apply(torch.ones(4, 2, 8), None))
    assert standin.unpinned_asynchronous_copies() == 0


def check_the_survey_counts_the_ranks_that_share_a_device() -> None:
    os.environ["ELASTIC_PLATFORM"] = "tests.standin.platform:StandinPlatform"
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(survey, linked().fabrics))
    assert found[0] == found[1] and (found[0].sharing, found[0].memory_bytes) == (2, 2 << 30)


def check_an_injected_slowness_is_in_proportion_to_the_devices_work() -> None:
    injector = Injector(parse("slow:factor=2"), 0, 0)
    measured = slow_pass(drag=partial(injector.drag, 0)).measured.read()
    assert measured[0].end_ns - measured[0].start_ns >= 2 * NAP
