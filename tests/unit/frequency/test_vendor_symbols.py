"""The names we rely on are those in the vendors' own packages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.elastic import _frequency
from megatron.elastic.platform import nvml
from tests.wheels import newest


def test_every_name_of_nvml_is_one_of_nvidia_ml_py():
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed (requirements/dev.txt)")
    source = Path(nvml.__file__).read_text()
    ours = set(re.findall(r'"(nvml\w+)"', source)) | set(re.findall(r"_nvml\.(\w+)", source))
    assert len(ours) == 19 and all(hasattr(pynvml, name) for name in ours)


@pytest.mark.slow
def test_dcmi_names_and_prototypes_are_those_of_torch_npu() -> None:
    """Of a wheel of 44 MB. It calls three of our functions; the others are in Ascend's driver alone."""
    with newest("torch-npu") as archive:
        library = archive.read("torch_npu/lib/libtorch_npu.so")
        header = archive.read("torch_npu/include/torch_npu/csrc/core/npu/interface/DcmiInterface.h").decode()
    theirs = {name: types(parameters) for name, parameters in re.findall(r"int Dcmi(\w+)\(([^)]*)\);", header)}
    source = (Path(__file__).parents[3] / "csrc/frequency/dcmi.cpp").read_text()
    (api,) = re.findall(r"struct Api \{(.*?)\};", source, re.DOTALL)
    ours = dict(zip(_frequency.symbols(), re.findall(r"int \(\*\w+\)\(([^)]*)\);", api), strict=True))
    for name in ("dcmi_init", "dcmi_get_card_num_list", "dcmi_get_device_id_in_card"):
        camel = "".join(part.capitalize() for part in name.split("_")[1:])
        assert name.encode() in library and types(ours[name]) == theirs[camel], name


def types(parameters: str) -> list[str]:
    """The types of a C parameter list, without its names."""
    words = [re.sub(r"\s*\*\s*", "* ", parameter).split() for parameter in parameters.split(",")]
    return [word[0] for word in words if word and word != ["void"]]
