"""The accelerator kernel: bits equal to the CPU's in Triton's interpreter, and it compiles for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch")


def run(script: str, folder: Path, interpret: bool, *arguments: str) -> str:
    """Output of a script in a fresh process: Triton decides at import whether it interprets."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": str(int(interpret))},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


COMPARE = """
import random, sys, torch
from megatron.elastic.engine.compute.dropout import DropoutKey, dropout_scope, sample_dropout
from megatron.elastic.engine.compute.dropout_triton import DTYPES, launch, row_layout
dice = random.Random(int(sys.argv[1]))
cases = 0
for sizes in ((1, 3, 130), (5, 2, 64), (2, 2, 5000), (3, 1, 7)):
    for dtype in DTYPES:
        sample_dim, before = dice.choice((0, 1)), dice.choice((0, 3, 64, 70))
        others = [size for dim, size in enumerate(sizes) if dim != sample_dim]
        extent, offset = list(others), [0, 0]
        for cut in (0,) if sample_dim == 0 else dice.choice(((0,), (1,), (0, 1))):
            extent[cut] += before + dice.choice((0, 5))
            offset[cut] = before
        key = DropoutKey(dice.getrandbits(64), dice.getrandbits(40),
                         tuple(dice.getrandbits(63) for _ in range(sizes[sample_dim])))
        x, residual = torch.randn(sizes).to(dtype), torch.randn(sizes).to(dtype)
        layout = row_layout(sizes, sample_dim, extent, offset)
        for added in (None, residual):
            with dropout_scope(key):
                expected = sample_dropout(x, 0.3, unit=2, site=1, sample_dim=sample_dim, extent=tuple(extent),
                                          offset=tuple(offset), residual=added)
            out = launch(x, added, layout, seed=key.seed, step=key.step, unit=2, site=1, samples=key.samples,
                         drop_below=round(0.3 * 2**32), scale=1 / (1 - 0.3))
            assert torch.equal(out, expected), (sizes, dtype, sample_dim, extent, offset, added is None)
            cases += 1
print(cases)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_kernel_and_the_cpu_give_the_same_bits(tmp_path, seed):
    assert run(COMPARE, tmp_path, True, str(seed)).split() == ["24"], f"seed {seed}"


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron.elastic.engine.compute.dropout_triton import _kernel
for dtype in ("fp32", "bf16", "fp16"):
    for add in (False, True):
        for integer in ("i32", "i64"):
            names = dict.fromkeys(("samples", "run", "first", "stride"), integer)
            pointers = {"src": "*" + dtype, "residual": "*" + dtype, "dst": "*" + dtype, "words": "*i64"}
            signature = {**pointers, "scale": "fp32", **names, "ADD": "constexpr", "BLOCKS": "constexpr"}
            source = ASTSource(fn=_kernel, signature=signature, constexprs={"ADD": add, "BLOCKS": 1024})
            options = {"enable_fp_fusion": False}
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            assert "mul.hi.u32" in compiled.asm["ptx"] and "fma.rn" not in compiled.asm["ptx"]
            assert len(compiled.asm["cubin"]) > 0
print("compiled")
"""


@pytest.mark.slow
def test_it_compiles_for_a_gpu_that_is_not_here(tmp_path):
    assert run(COMPILE, tmp_path, False).split() == ["compiled"]


@pytest.mark.parametrize(
    ("sizes", "sample_dim", "extent", "offset"),
    [
        ((4, 2, 8, 8), 0, (2, 8, 8), (0, 0, 0)),  # samples first
        ((2, 4, 8, 16), 0, (8, 8, 16), (4, 0, 0)),  # heads cut
        ((8, 2, 16), 1, (16, 16), (8, 0)),  # sequence cut
        ((8, 2), 1, (16,), (8,)),  # samples innermost
    ],
)
def test_megatron_sites_are_rows(sizes, sample_dim, extent, offset):
    from megatron.elastic.engine.compute.dropout_triton import row_layout

    layout = row_layout(sizes, sample_dim, extent, offset)
    assert layout is not None
    assert layout.outer * layout.samples * layout.run == torch.Size(sizes).numel()


def test_layouts_that_are_no_rows_are_left_to_tensor_operations():
    from megatron.elastic.engine.compute.dropout_triton import row_layout

    assert row_layout((2, 4, 8, 8), 0, (4, 16, 8), (0, 8, 0)) is None
    assert row_layout((8, 4, 2, 16), 2, (8, 8, 16), (0, 4, 0)) is None
