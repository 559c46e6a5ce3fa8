"""The number that a device has on its machine, for a process that sees some of them."""

from __future__ import annotations

import pytest

from megatron.elastic.platform.visible_devices import number_on_machine


@pytest.mark.parametrize(
    ("visible", "index", "number"),
    [(None, 3, "3"), ("", 3, "3"), ("6,7", 0, "6"), ("6, 7", 1, "7"), ("GPU-8a,GPU-9b", 1, "GPU-9b")],
)
def test_a_device_is_the_one_that_the_environment_lists_at_its_place(
    visible: str | None, index: int, number: str
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert number_on_machine(index, "CUDA_VISIBLE_DEVICES", environ) == number
