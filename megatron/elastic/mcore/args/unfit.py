"""Flags with which Megatron itself fails or computes something wrong: refused, with and without ``--elastic``.

Megatron runs most of them into a traceback, some hours after the start, and trains some with weights that have no
values. Each function of a row looks at parsed arguments that are not yet validated.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.elastic.mcore.args.folders import TRACKER

__all__ = ["UNFIT", "Unfit", "unfit_faults"]


@dataclass(frozen=True)
class Unfit:
    """A flag, the test whether it is used so, and the reason with the fix."""

    flag: str
    used: Callable[[Namespace], bool]
    fix: str
    always: bool = True
    """False if there are flags beside which this one is honoured."""


def _set(attribute: str) -> Callable[[Namespace], bool]:
    return lambda args: getattr(args, attribute, None) not in (None, False, "")


def _loads(args: Namespace) -> bool:
    """Return whether a checkpoint is there that gives weights their values."""
    folders = [getattr(args, name, None) for name in ("load", "pretrained_checkpoint")]
    return any("://" in folder or (Path(folder) / TRACKER).is_file() for folder in folders if folder)


def _without_values(args: Namespace) -> bool:
    return getattr(args, "perform_initialization", True) is False and not _loads(args)


def _on_meta(args: Namespace) -> bool:
    fsdp = getattr(args, "use_torch_fsdp2", False) or getattr(args, "use_megatron_fsdp", False)
    return bool(getattr(args, "init_model_with_meta_device", False)) and not fsdp and not _loads(args)


def _unnamed_positions(args: Namespace) -> bool:
    rotary = getattr(args, "position_embedding_type", "rope") == "rope"
    rotary = rotary or getattr(args, "use_rotary_position_embeddings", False)
    return getattr(args, "add_position_embedding", True) is False and not rotary


def _shapes_from_text(args: Namespace) -> bool:
    given: Any = getattr(args, "heterogeneous_layers_config_encoded_json", None)
    return given is not None and getattr(args, "heterogeneous_layers_config_path", None) is None


def _unreadable_shapes(args: Namespace) -> bool:
    """Return whether the shapes of layers are in no file, or not as Megatron reads them."""
    path = getattr(args, "heterogeneous_layers_config_path", None)
    if path is None:
        return False
    try:
        found = json.loads(getattr(args, "heterogeneous_layers_config_encoded_json", None) or Path(path).read_text())
    except (OSError, ValueError):
        return True
    return not (isinstance(found, dict) and {"hidden_act", "block_configs"} <= found.keys())


def _pads_for(attribute: str) -> Callable[[Namespace], bool]:
    return lambda args: _set(attribute)(args) and not (getattr(args, "fp8", None) or getattr(args, "fp4", None))


def _trains_on(attribute: str) -> Callable[[Namespace], bool]:
    return lambda args: _set(attribute)(args) and getattr(args, "transformer_impl", "") != "inference_optimized"


def _returns_lists(args: Namespace) -> bool:
    asked = str(getattr(args, "dist_ckpt_strictness", ""))
    return asked.startswith("return_") and any(getattr(args, name, None) for name in ("load", "pretrained_checkpoint"))


_NO_VALUES = "leaves weights without values where no checkpoint is loaded"
_NO_LONGER = "is no longer a flag of Megatron"
_INFERENCE = "is for inference alone, and Megatron does not train with it: leave it out"
_PADS = "needs --fp8-format or --fp4-format: leave it out"

# A table: one row a line, which the formatter would break up.
# fmt: off
UNFIT: tuple[Unfit, ...] = (
    Unfit("--batch-size", _set("batch_size"), f"{_NO_LONGER}: use --micro-batch-size"),
    Unfit("--warmup", _set("warmup"), f"{_NO_LONGER}: use --lr-warmup-fraction"),
    Unfit("--model-parallel-size", _set("model_parallel_size"), f"{_NO_LONGER}: use --tensor-model-parallel-size"),
    Unfit("--checkpoint-activations", _set("checkpoint_activations"), f"{_NO_LONGER}: use --recompute-activations"),
    Unfit("--lazy-mpu-init", _set("lazy_mpu_init"),
          "needs another program that makes Megatron's groups: leave it out"),
    Unfit("--init-method-xavier-uniform", _set("init_method_xavier_uniform"),
          "sets what megatron.core has not (scaled_init_method): use --init-method-std"),
    Unfit("--config-logger-dir", _set("config_logger_dir"),
          "fails, since Megatron cannot copy the process groups of a model: leave it out"),
    Unfit("--tokenizer-sentencepiece-legacy", _set("tokenizer_sentencepiece_legacy"),
          "makes a tokenizer without a token for the end of a document, which data need: leave it out"),
    Unfit("--heterogeneous-layers-config-encoded-json", _shapes_from_text,
          "alone makes layers of equal shapes: write it to a file, and give --heterogeneous-layers-config-path"),
    Unfit("--heterogeneous-layers-config-path", _unreadable_shapes,
          "names no JSON file with hidden_act and block_configs, as a config.json of Hugging Face has: give another",
          always=False),
    Unfit("--cache-mla-latents", lambda args: _set("cache_mla_latents")(args) and _set("multi_latent_attention")(args),
          _INFERENCE),
    Unfit("--inference-fuse-tp-communication", _trains_on("inference_fuse_tp_communication"), _INFERENCE),
    Unfit("--inference-disable-triton-nvls-kernels", _trains_on("inference_disable_triton_nvls_kernels"), _INFERENCE),
    Unfit("--no-initialization", _without_values, f"{_NO_VALUES}: leave it out, or give --load", always=False),
    Unfit("--init-model-with-meta-device", _on_meta, f"{_NO_VALUES}, without FSDP: leave it out, or give --load",
          always=False),
    Unfit("--no-position-embedding", _unnamed_positions,
          "has another name: use --position-embedding-type rope, or none for no positions", always=False),
    Unfit("--moe-router-padding-for-quantization", _pads_for("moe_router_padding_for_quantization"), _PADS,
          always=False),
    Unfit("--moe-router-padding-for-fp8", _pads_for("moe_router_padding_for_fp8"), _PADS, always=False),
    Unfit("--dist-ckpt-strictness", _returns_lists,
          "return_unexpected and return_all are for programs that call megatron.core; Megatron's load fails: use "
          "log_all or raise_all", always=False),
)
# fmt: on
"""Flags in the order of the documentation."""


def unfit_faults(args: Namespace) -> Iterator[str]:
    """Yield a line for each flag of ``args`` with which Megatron does not train."""
    for row in UNFIT:
        if row.used(args):
            yield f"{row.flag} {row.fix}"
