"""The replacement of every dropout of a Megatron GPT by sample-keyed dropout.

Sites: embedding, attention probabilities (local core attention), the
bias-dropout-add after attention and after the MLP. Noise in a router's input is drawn
alike. A fused attention kernel draws its own masks and cannot be keyed by sample. :func:`key_dropout` returns the
names of such modules, and :func:`unkeyed_line` the line to log, or the refusal in exact mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityFuncOp
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

from megatron.elastic.config import ConfigError
from megatron.elastic.engine.compute.dropout import (
    BiasDropoutAdd,
    Intervals,
    SampleDropout,
    Section,
    Site,
    Split,
    current_key,
    dropout_scope,
)
from megatron.elastic.engine.compute.jitter import SampleJitter
from megatron.elastic.mcore.model.prediction import further_unit
from megatron.elastic.mcore.model.sequence_gather import SequencePart
from megatron.elastic.state.coverage import Position

__all__ = ["Slices", "key_dropout", "key_module", "launch_slices", "unkeyed_line"]

T = TypeVar("T")

_NUMBERED = "numbers_uses"
"""Attribute of layers of further tokens whose passes are numbered; copies of them have it, and their hooks."""


def key_dropout(model: Any, tensor_parallel_rank: int) -> tuple[str, ...]:
    """Replace dropout throughout ``model`` (an unwrapped GPTModel), in place.

    Returns the names of modules whose dropout is inside a vendor kernel and
    still depends on rank and history.
    """
    modules = [getattr(model, "embedding", None), *model.decoder.layers, getattr(model, "mtp", None)]
    slices = launch_slices(model.config, tensor_parallel_rank)
    found = (key_module(model, module, slices) for module in modules if module is not None)
    return tuple(name for names in found for name in names)


def unkeyed_line(modules: Sequence[str], exact: bool) -> str:
    """Return the line to log about ``modules`` that draw masks themselves; empty if there are none.

    Raises ``ConfigError`` in exact mode, whose promise they would break.
    """
    if not modules:
        return ""
    found = f"{modules[0]} and {len(modules) - 1} more" if len(modules) > 1 else modules[0]
    instead = "use --attention-dropout 0, or --transformer-impl local"
    if exact:
        raise ConfigError(f"--elastic-exact: a kernel draws dropout masks by itself ({found}); {instead}")
    return (
        f"a kernel draws attention dropout masks by itself ({found}): after a loss they differ from those of an "
        f"undisturbed run; to keep them, {instead}"
    )


@dataclass(frozen=True)
class Slices:
    """This rank's slices of activations: of the heads [b, np, sq, sk], and of the sequence [s, b, h] (None: whole).

    With context parallelism ``positions`` replace ``sequence``, and ``queries`` are those of sq.
    """

    heads: Split | Section
    sequence: Split | None
    positions: Intervals | None = None
    queries: Intervals | None = None

    def of_part(self, part: SequencePart, tensor: Position) -> Slices:
        """Return the slices of a tensor-parallel position that has this part of the sequence."""
        held = part.cut.held(part.part.index * tensor.count + tensor.index, part.part.count * tensor.count)
        length = part.cut.length
        return Slices(self.heads, None, Intervals(0, held, length), Intervals(2, part.runs, length))


def launch_slices(config: Any, tensor_parallel_rank: int) -> Slices:
    """Return the slices of a tensor-parallel rank of the launch."""
    even = Split(dim=1, index=tensor_parallel_rank, count=config.tensor_model_parallel_size)
    return Slices(even, replace(even, dim=0) if config.sequence_parallel else None)


def key_module(model: Any, module: Any, slices: Slices) -> list[str]:
    """Replace dropout in one embedding or layer of ``model`` (others have none), like :func:`key_dropout`."""
    if hasattr(module, "embedding_dropout"):
        module.embedding_dropout = SampleDropout(
            model.config.hidden_dropout,
            unit=0,
            site=Site.EMBEDDING,
            sample_dim=1,
            split=slices.sequence,
            intervals=slices.positions,
        )
        return []
    if isinstance(module, MultiTokenPredictionBlock):
        _number_uses(module)
        config, layers = model.config, module.layers
        found = [_key_layer(one.mtp_model_layer, slices, further_unit(config, one.layer_number)) for one in layers]
        return [name for names in found for name in names]
    if hasattr(module, "layer_number"):
        return _key_layer(module, slices, int(module.layer_number))
    return []


def _number_uses(block: MultiTokenPredictionBlock) -> None:
    """Have the pass of each further token draw masks of its own.

    All look tokens up in one embedding, and one layer may predict all of them. A recomputation runs what the pass
    gave it, so it draws the same masks again. Idempotent: dropout is replaced again where the sequence is cut.
    """
    if getattr(block, _NUMBERED, False):
        return
    setattr(block, _NUMBERED, True)
    number = 0

    def begin(block: Any, arguments: Any) -> None:
        nonlocal number
        number = 0

    def enter(layer: Any, arguments: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        nonlocal number
        number += 1
        layer._proj_and_transformer_layer = partial(_in_use, number, layer._proj_and_transformer_layer)
        return arguments, {**given, "embedding": partial(_in_use, number, given["embedding"])}

    def leave(layer: Any, arguments: Any, output: Any) -> None:
        del layer._proj_and_transformer_layer  # the attribute of this pass, in front of the class's

    block.register_forward_pre_hook(begin)
    for layer in block.layers:
        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.register_forward_hook(leave, always_call=True)


def _in_use(number: int, body: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Return ``body(...)``, whose masks are those of use ``number``. Outside of a piece nothing draws any."""
    key = current_key()
    if key is None:
        return body(*arguments, **named)
    with dropout_scope(replace(key, use=number)):
        return body(*arguments, **named)


def _key_layer(layer: Any, slices: Slices, unit: int) -> list[str]:
    """``unit``: the one under which the layer draws its masks."""
    sequence, positions = slices.sequence, slices.positions
    for name, site in (("self_attn_bda", Site.ATTENTION_OUTPUT), ("mlp_bda", Site.MLP_OUTPUT)):
        if not isinstance(getattr(layer, name), IdentityFuncOp):  # else the layer has no such part
            setattr(layer, name, BiasDropoutAdd(unit, site, sequence, intervals=positions))
    router = getattr(layer.mlp, "router", None)
    if router is not None and layer.config.moe_input_jitter_eps is not None:
        device = torch.device(torch.cuda.current_device())
        router.input_jitter = SampleJitter(
            layer.config.moe_input_jitter_eps, unit, layer.config.params_dtype, device, sequence, positions
        )
    core = getattr(layer.self_attention, "core_attention", None)
    if isinstance(core, DotProductAttention):
        core.attention_dropout = SampleDropout(
            _probability(core.attention_dropout),
            unit=unit,
            site=Site.ATTENTION_PROBS,
            sample_dim=0,
            split=slices.heads,
            intervals=slices.queries,
        )
        return []
    if core is None or layer.config.attention_dropout == 0.0:
        return []
    return [f"layer {unit}: {type(core).__name__}"]


def _probability(module: torch.nn.Module) -> float:
    return float(getattr(module, "p", 0.0))
