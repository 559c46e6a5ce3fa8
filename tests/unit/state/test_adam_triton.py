"""The accelerator's updates: bits equal to the host kernel's in Triton's interpreter, and correctly rounded code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch")


def run(script: str, folder: Path, interpret: bool) -> str:
    """Output of a script in a fresh process: Triton decides at import whether it interprets."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": str(int(interpret))},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


COMPARE = """
import torch
from megatron.elastic.platform.cpu import CpuPlatform
from megatron.elastic.state.adam_triton import triton_kernels
from megatron.elastic.state.device_place import DevicePlace
from megatron.elastic.state.step_selftest import differing
print(differing(DevicePlace(CpuPlatform(), torch.device("cpu"), triton_kernels())))
"""


def test_the_kernels_and_the_host_give_the_same_bits(tmp_path):
    assert run(COMPARE, tmp_path, True).strip() == "()"


COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron.elastic.state.adam_triton import _adam, _lion, _sgd
adam = ("multiplier", "decay", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "step_size", "correction")
kernels = {_adam: (("master", "exp_avg", "exp_avg_sq", "grad"), adam, True),
           _lion: (("master", "momentum", "grad"),
                   ("multiplier", "decay", "one_minus_beta1", "one_minus_beta2", "lr"), False),
           _sgd: (("master", "momentum", "grad"), ("multiplier", "decay", "friction", "lr"), False)}
for kernel, (pointers, scalars, roots) in kernels.items():
    for decoupled in (False, True) if roots else (None,):
        constants = {"BLOCK": 1024} if decoupled is None else {"DECOUPLED": decoupled, "BLOCK": 1024}
        signature = dict.fromkeys(pointers, "*fp32") | dict.fromkeys(scalars, "fp32") | {"count": "i32"}
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        for capability in (80, 90):
            options = {"enable_fp_fusion": False}
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            code = compiled.asm["ptx"]
            assert not re.search(r"fma|mad[.]f|[.]ftz|[.]approx|[.]full", code), code
            assert roots == ("sqrt.rn.f32" in code) == ("div.rn.f32" in code)
            assert len(compiled.asm["cubin"]) > 0
print("compiled")
"""


@pytest.mark.slow
def test_code_for_a_gpu_that_is_not_here_rounds_each_operation_correctly(tmp_path):
    assert run(COMPILE, tmp_path, False).split() == ["compiled"]
