"""``pretrain_gpt.py`` in whose layers tensors are rounded to 8 bits with scales of past passes.

Layers keep scales and histories as those of Transformer Engine do in FP8 with ``--fp8-recipe delayed``: in the buffers
``scaling_fwd`` and ``scaling_bwd``, which the engine reads and writes. In a run without ``--elastic`` layers register
these with ``FP8GlobalStateManager``, which makes new scales after each forward and each backward, over all replicas.
Inputs, weights of column-parallel products and gradients are rounded. A CPU multiplies nothing in FP8, so the products
themselves are in fp32.

With ``SCALES_OF_ONE_RANK`` the engine's row of the patch table is left out, so that scales follow micro-batches under
``--elastic`` too.
"""

from __future__ import annotations

import os
import pickle
import runpy
import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import megatron.elastic.adaptor

# isort: split

import megatron.training  # noqa: F401 - before there is a package that it would take for Transformer Engine
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.elastic.mcore.args import support
from megatron.elastic.mcore.model import delayed_scales

ROOT = Path(__file__).resolve().parents[2]
WINDOW = 4
LARGEST = {"scaling_fwd": 448.0, "scaling_bwd": 57344.0}
TYPES = {"scaling_fwd": torch.float8_e4m3fn, "scaling_bwd": torch.float8_e5m2}
SIZES = {"scaling_fwd": 3, "scaling_bwd": 2}


class FP8GlobalStateManager:
    """The part of Transformer Engine's that layers call."""

    registered: list[dict[str, Any]] = []  # noqa: RUF012 - as in Transformer Engine

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, meta: dict[str, Any]) -> None:
        if all(meta is not other for other in cls.registered):
            cls.registered.append(meta)

    @classmethod
    def update(cls, name: str) -> None:
        """Make new scales of the present pass."""
        for meta in cls.registered:
            buffer = meta[name]
            if dist.get_world_size() > 1 and "--elastic" not in sys.argv:
                group = parallel_state.get_data_parallel_group()
                dist.all_reduce(buffer.amax_history[0], dist.ReduceOp.MAX, group=group)
            amax = buffer.amax_history.amax(0)
            buffer.scale.copy_(torch.where(amax > 0, LARGEST[name] / amax, buffer.scale))
            buffer.amax_history.copy_(buffer.amax_history.roll(-1, 0))
            buffer.amax_history[0].zero_()


def rounded(values: torch.Tensor, meta: dict[str, Any], name: str, number: int) -> torch.Tensor:
    """``values`` in 8 bits; their largest one is noted."""
    buffer = meta[name]
    buffer.amax_history[0, number].clamp_(min=values.abs().max())
    scale, largest = buffer.scale[number], LARGEST[name]
    return (values * scale).clamp(-largest, largest).to(TYPES[name]).to(values.dtype) / scale


class RoundedInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, meta: dict[str, Any]) -> torch.Tensor:
        return rounded(values, meta, "scaling_fwd", 0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer = layer
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        result = rounded(gradients[0], ctx.layer.fp8_meta, "scaling_bwd", 0)
        registered = FP8GlobalStateManager.registered
        if registered and registered[0] is ctx.layer.fp8_meta:  # the last one in a backward
            FP8GlobalStateManager.update("scaling_bwd")
        return result, None


def init_fp8_metadata(self: Any, num_gemms: int = 1) -> None:
    for name, size in SIZES.items():
        if name not in self.fp8_meta:
            self.fp8_meta[name] = SimpleNamespace(scale=torch.ones(size), amax_history=torch.zeros(WINDOW, size))


def get_extra_state(self: Any) -> torch.Tensor | None:
    if not getattr(self, "fp8_meta", None):
        return None
    state = {name: (self.fp8_meta[name].scale.tolist(), self.fp8_meta[name].amax_history.tolist()) for name in SIZES}
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def set_extra_state(self: Any, state: torch.Tensor | None) -> None:
    if isinstance(state, torch.Tensor) and state.numel():
        init_fp8_metadata(self)
        for name, (scale, history) in pickle.loads(state.numpy().tobytes()).items():
            self.fp8_meta[name].scale.copy_(torch.tensor(scale))
            self.fp8_meta[name].amax_history.copy_(torch.tensor(history))


@contextmanager
def fp8_context(config: Any, *args: Any, **kwargs: Any) -> Any:
    yield
    if torch.is_grad_enabled():
        FP8GlobalStateManager.update("scaling_fwd")


def replace_products() -> None:
    """Have the four products of a layer round their tensors."""
    original_init = TransformerLayer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        for part in self.modules():
            if isinstance(part, (ColumnParallelLinear, RowParallelLinear)):
                part.fp8_meta, part.is_first_microbatch = {}, True  # type: ignore[assignment]

    TransformerLayer.__init__ = __init__
    for kind in (ColumnParallelLinear, RowParallelLinear):
        kind.forward = rounding(kind.forward)
        kind.init_fp8_metadata = init_fp8_metadata
        kind.get_extra_state, kind.set_extra_state = get_extra_state, set_extra_state


def rounding(original: Any) -> Any:
    """``original``, a forward, with rounded input, weight and gradient."""

    def forward(self: Any, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        meta = getattr(self, "fp8_meta", None)
        if meta is None:
            return original(self, input_, *args, **kwargs)
        self.init_fp8_metadata()
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(meta)
        if isinstance(self, ColumnParallelLinear):
            if self.is_first_microbatch:
                self.kept = rounded(self.weight.detach(), meta, "scaling_fwd", 1)
            kwargs["weight"] = self.weight + (self.kept - self.weight).detach()
        self.is_first_microbatch = False
        output, bias = original(self, RoundedInput.apply(input_, meta), *args, **kwargs)
        return RoundedGradient.apply(output, self), bias

    return forward


def offer_package() -> None:
    """Make the class importable by the name that the patch table has."""
    path = "transformer_engine"
    for name in ("", ".pytorch", ".fp8"):
        path += name
        sys.modules[path] = module = ModuleType(path)
        module.__spec__ = ModuleSpec(path, None)
    module.FP8GlobalStateManager = FP8GlobalStateManager  # type: ignore[attr-defined]


def main() -> None:
    """Replace the products, accept the flags on a CPU, train."""
    replace_products()
    transformer_block.get_fp8_context = fp8_context
    offer_package()
    support._refusals = lambda *_: iter(())  # type: ignore[assignment]
    if "SCALES_OF_ONE_RANK" in os.environ:
        delayed_scales.rows = lambda args: ()  # type: ignore[assignment]
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")


if __name__ == "__main__":
    main()
