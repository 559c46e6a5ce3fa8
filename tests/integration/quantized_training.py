"""``pretrain_gpt.py`` in whose layers Megatron's column-parallel products take an 8-bit copy of their weight.

A layer makes its copy as one of Transformer Engine does in FP8 with ``--fp8-recipe tensorwise``: in the first forward
after ``is_first_microbatch`` was set, scaled by the largest value of the weight. It keeps this copy until the flag is
set again.
Gradients are those of the weight. A CPU multiplies nothing in FP8, so the products themselves are in fp32.
With ``QUANTIZED_ONCE`` layers keep their first copy for ever.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import torch

import megatron.elastic.adaptor  # noqa: F401 - it patches Megatron

# isort: split

from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron.elastic.mcore.args import support

ROOT = Path(__file__).resolve().parents[2]


def quantized(weight: torch.Tensor) -> torch.Tensor:
    """The values of ``weight`` in E4M3, scaled so that the largest is E4M3's largest."""
    scale = torch.finfo(torch.float8_e4m3fn).max / weight.abs().amax().clamp_min(1e-12)
    return (weight * scale).to(torch.float8_e4m3fn).to(weight.dtype) / scale


def main() -> None:
    """Replace the products, accept the flags on a CPU, train."""
    original_init, original = ColumnParallelLinear.__init__, ColumnParallelLinear.forward

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        self.is_first_microbatch, self.kept = True, None

    def forward(self: Any, input_: torch.Tensor, weight: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if weight is None:
            if self.kept is None or (self.is_first_microbatch and "QUANTIZED_ONCE" not in os.environ):
                self.kept, self.is_first_microbatch = quantized(self.weight.detach()), False
            weight = self.weight + (self.kept - self.weight).detach()
        return original(self, input_, weight, **kwargs)

    ColumnParallelLinear.__init__, ColumnParallelLinear.forward = __init__, forward
    support._refusals = lambda *_: iter(())  # type: ignore[assignment]
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")


if __name__ == "__main__":
    main()
