"""The names we rely on are those in the vendors' own packages."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from megatron.elastic import _frequency
from megatron.elastic.platform import nvml


def test_every_name_of_nvml_is_one_of_nvidia_ml_py():
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed (requirements/dev.txt)")
    source = Path(nvml.__file__).read_text()
    ours = set(re.findall(r'"(nvml\w+)"', source)) | set(re.findall(r"_nvml\.(\w+)", source))
    assert len(ours) == 19 and all(hasattr(pynvml, name) for name in ours)


def test_dcmi_names_are_those_torch_npu_looks_up():
    found = importlib.util.find_spec("torch_npu")
    if found is None or found.origin is None:
        pytest.skip("torch-npu is not installed (requirements/ascend.txt)")
    library = (Path(found.origin).parent / "lib" / "libtorch_npu.so").read_bytes()
    for name in ("dcmi_init", "dcmi_get_card_num_list", "dcmi_get_device_id_in_card"):
        assert name in _frequency.symbols() and name.encode() in library
