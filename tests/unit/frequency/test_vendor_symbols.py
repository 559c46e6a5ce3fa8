"""The names and numbers we rely on are those in the vendors' own packages."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from megatron.elastic import _frequency

NVML_SOURCE = Path(__file__).resolve().parents[3] / "csrc" / "frequency" / "nvml.cpp"


def test_nvml_names_are_those_of_nvidia_ml_py():
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed (requirements/dev.txt)")
    looked_up = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', Path(pynvml.__file__).read_text()))
    ours = set(_frequency.symbols("nvml"))
    # nvidia-ml-py initialises through nvmlInitWithFlags; nvmlInit_v2 is the same call without flags.
    assert ours - looked_up <= {"nvmlInit_v2"}
    assert len(ours) == 13


def test_nvml_numbers_are_those_of_nvidia_ml_py():
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed (requirements/dev.txt)")
    source = NVML_SOURCE.read_text()
    for ours, theirs in (
        ("kSuccess", pynvml.NVML_SUCCESS),
        ("kNotSupported", pynvml.NVML_ERROR_NOT_SUPPORTED),
        ("kNoPermission", pynvml.NVML_ERROR_NO_PERMISSION),
        ("kInsufficientSize", pynvml.NVML_ERROR_INSUFFICIENT_SIZE),
        ("kClockSm", pynvml.NVML_CLOCK_SM),
    ):
        assert re.search(rf"constexpr \w+ {ours} = {theirs};", source), ours
    assert pynvml.NVML_DEVICE_NAME_V2_BUFFER_SIZE == 96 and "char name[96]" in source


def test_dcmi_names_are_those_torch_npu_looks_up():
    found = importlib.util.find_spec("torch_npu")
    if found is None or found.origin is None:
        pytest.skip("torch-npu is not installed (requirements/ascend.txt)")
    library = (Path(found.origin).parent / "lib" / "libtorch_npu.so").read_bytes()
    for name in ("dcmi_init", "dcmi_get_card_num_list", "dcmi_get_device_id_in_card"):
        assert name in _frequency.symbols("dcmi") and name.encode() in library
