"""Scales and largest values in layers of Transformer Engine (:mod:`megatron.elastic.state.delayed_scaling`).

Each product of such a layer has three tensors in its forward (input, weight, output) and two in its backward (gradients
of output and input). A buffer of each direction has their scales, and a history of their largest absolute values. Its
row 0 has those of the present pass: kernels take the maximum of what is there and of each tensor that they round. After
each micro-batch Transformer Engine would make new scales of it, for the layers that have registered themselves.

Here no layer registers itself (the row of the patch table). Every pass begins with the scales of the step's record and
zeros in row 0, and ends with the largest values of all its micro-batches there. The rest of a history is filled only
for a checkpoint.

Source: ``transformer_engine/pytorch/quantization.py`` and ``module/base.py`` (2.20).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.elastic.config import ConfigError
from megatron.elastic.mcore.patching.patches import Row
from megatron.elastic.state.delayed_scaling import DelayedScaling, TensorScale

__all__ = ["delayed_scaling", "largest_values", "present_scales", "rows", "set_past", "set_scales"]

_E4M3, _E5M2 = 448.0, 57344.0
_FORWARD, _BACKWARD = 3, 2
"""Tensors of a product."""
_BUFFERS = ("scaling_fwd", "scaling_bwd")


def rows(args: Any) -> tuple[Row, ...]:
    """Rows of the patch table; none for a run without such scales, or that is refused for want of the package."""
    if not _follow(args) or find_spec("transformer_engine") is None:
        return ()
    return (
        (
            "transformer_engine.pytorch.fp8.FP8GlobalStateManager.add_fp8_tensors_to_global_buffer",
            "scales change once a step, with its record: not with each micro-batch of this rank",
            lambda original: lambda *args, **kwargs: None,
        ),
    )


def delayed_scaling(args: Any, modules: Iterable[torch.nn.Module]) -> DelayedScaling | None:
    """Return the tensors of the model whose scales follow past steps. ``modules``: of this rank.

    Raises ``ConfigError`` unless they have layers with equally many products in FP8, as those of other ranks then have.
    """
    if not _follow(args):
        return None
    numbers = {len(layers) for _, layers in _quantizing(modules)}
    if len(numbers) != 1 or numbers == {0}:
        raise ConfigError(
            "--fp8-recipe delayed: each stage needs layers, with equally many linear layers of Transformer Engine; "
            f"here they have {sorted(numbers) or 'none'}: use --fp8-recipe tensorwise"
        )
    backward = _E5M2 if args.fp8 == "hybrid" else _E4M3
    return DelayedScaling(
        units=tuple(range(1, args.num_layers + 1)),
        largest=numbers.pop() * (*(_E4M3,) * _FORWARD, *(backward,) * _BACKWARD),
        window=args.fp8_amax_history_len if args.fp8_amax_compute_algo == "max" else 1,
        margin=args.fp8_margin,
    )


def _follow(args: Any) -> bool:
    """Return whether scales follow past steps."""
    return bool(getattr(args, "fp8", None)) and args.fp8_recipe == "delayed"


def set_scales(modules: Iterable[torch.nn.Module], config: Any, scales: Mapping[int, Sequence[float]]) -> None:
    """Set the scales of layers (unit → one a tensor), and forget the largest values of the pass before."""
    found = list(_buffers(modules, config))
    if not found:
        return
    values = [value for unit, _ in found for value in scales[unit]]
    buffers = [buffer for _, of_unit in found for buffer in of_unit]
    flat = torch.tensor(values, dtype=torch.float32, device=buffers[0].scale.device)
    for buffer, part in zip(buffers, flat.split([buffer.scale.numel() for buffer in buffers]), strict=True):
        buffer.scale.copy_(part)
        buffer.amax_history[0].zero_()


def largest_values(modules: Iterable[torch.nn.Module], config: Any) -> dict[int, tuple[float, ...]]:
    """Return unit → largest absolute value of each of its tensors since :func:`set_scales`. Waits for the device."""
    found = list(_buffers(modules, config))
    if not found:
        return {}
    values = iter(torch.cat([buffer.amax_history[0] for _, of_unit in found for buffer in of_unit]).tolist())
    sizes = {unit: sum(buffer.scale.numel() for buffer in of_unit) for unit, of_unit in found}
    return {unit: tuple(next(values) for _ in range(size)) for unit, size in sizes.items()}


def set_past(modules: Iterable[torch.nn.Module], config: Any, tensors: Mapping[int, Sequence[TensorScale]]) -> None:
    """Set scales and histories of layers, for a checkpoint.

    Values that can never be the largest again are zeros, so Transformer Engine goes on from it with the same scales.
    """
    for unit, of_unit in _buffers(modules, config):
        at = 0
        for buffer in of_unit:
            history = torch.zeros(buffer.amax_history.shape)
            part = tensors[unit][at : at + buffer.scale.numel()]
            for number, tensor in enumerate(part):
                for age, value in tensor.past:
                    history[history.shape[0] - 1 - age, number] = value
            buffer.amax_history.copy_(history)
            buffer.scale.copy_(torch.tensor([tensor.scale for tensor in part]))
            at += len(part)


def present_scales(modules: Iterable[torch.nn.Module], window: int) -> dict[int, tuple[TensorScale, ...]]:
    """Return unit → its tensors, as a checkpoint has filled their buffers; without units that have none."""
    return {
        unit: tuple(
            TensorScale.of(float(buffer.scale[number]), buffer.amax_history[1:, number].flip(0).tolist(), window)
            for layer in layers
            for buffer in (layer.fp8_meta[name] for name in _BUFFERS)
            for number in range(buffer.scale.numel())
        )
        for unit, layers in _quantizing(modules)
        if all(name in layer.fp8_meta for layer in layers for name in _BUFFERS)
    }


def _buffers(modules: Iterable[torch.nn.Module], config: Any) -> Iterator[tuple[int, list[Any]]]:
    """Yield (unit, buffers of its layers), after making those that are missing, as a first forward does."""
    for unit, layers in _quantizing(modules):
        missing = [layer for layer in layers if any(name not in layer.fp8_meta for name in _BUFFERS)]
        if missing:
            with get_fp8_context(config):
                for layer in missing:
                    layer.init_fp8_metadata(num_gemms=1)
        yield unit, [layer.fp8_meta[name] for layer in layers for name in _BUFFERS]


def _quantizing(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[int, list[Any]]]:
    """Yield (unit, its products in FP8). Megatron numbers layers as units are."""
    for module in modules:
        for layer in module.modules():
            if isinstance(layer, TransformerLayer):
                yield int(layer.layer_number), [part for part in layer.modules() if _is_product(part)]


def _is_product(module: torch.nn.Module) -> bool:
    """Return whether it is a linear layer of Transformer Engine. Its attention has such buffers, but no weight."""
    return hasattr(module, "fp8_meta") and hasattr(module, "is_first_microbatch")
