"""Flags of Megatron that each work with ``--elastic``, and do not together.

Each function yields one line a fault, which names the flags and the fix.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron.elastic.config import ElasticConfig
from megatron.elastic.mcore.args.moments import moment_faults

__all__ = [
    "layer_faults",
    "mask_faults",
    "packing_faults",
    "pickled_scales",
    "precision_faults",
    "prediction_faults",
    "takes_masks",
]

_ALLOWED = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def precision_faults(args: Namespace, platform: str) -> Iterator[str]:
    """Yield what does not hold with types that a run chooses for layers and for optimizer state."""
    if getattr(args, "fp8", None) and args.fp8_recipe != "custom":
        yield from _fp8_faults(args, platform)
    if getattr(args, "use_precision_aware_optimizer", False):
        yield from moment_faults(args)


def _fp8_faults(args: Namespace, platform: str) -> Iterator[str]:
    flag = f"--fp8-format {args.fp8}"
    if platform != "cuda":
        yield f"{flag} needs Transformer Engine on a GPU: leave it out here"
        return
    if args.transformer_impl != "transformer_engine":
        yield f"{flag} needs the layers of Transformer Engine: leave out --transformer-impl {args.transformer_impl}"
    if args.num_experts:
        yield f"{flag} with --num-experts: with --elastic such layers are Megatron's own, which have no FP8: use --bf16"
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        if getattr(args, name, False):
            yield (
                f"--{name.replace('_', '-')}: Transformer Engine scales the softmax by past micro-batches, which other "
                "ranks may have computed: leave it out"
            )
    if args.fp8_recipe == "delayed":
        yield from _delayed_faults(args)
    if getattr(args, "recompute_granularity", None) == "full":
        yield (
            f"{flag} with --recompute-granularity full: Transformer Engine recomputes such layers itself, without the "
            "dropout of each sample: use --recompute-granularity selective"
        )


def _delayed_faults(args: Namespace) -> Iterator[str]:
    """Yield where scales that follow past steps are not known by layer and tensor."""
    for flag, asked in (
        ("--mtp-num-layers", args.mtp_num_layers),
        ("--heterogeneous-layers-config-path", args.heterogeneous_layers_config_path),
    ):
        if asked:
            yield f"--fp8-recipe delayed with {flag}: layers must have equal tensors: use --fp8-recipe tensorwise"


def pickled_scales(args: Namespace, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a warning where Transformer Engine would refuse the checkpoints of this run (2.20 and later do)."""
    kept = getattr(args, "fp8", None) and args.fp8_recipe == "delayed" and (args.save or args.load)
    if not kept or environ.get(_ALLOWED) == "1":
        return ()
    engine = find_spec("transformer_engine")
    places = (engine.submodule_search_locations if engine is not None else None) or ()
    if not any((Path(place) / "pytorch" / "_extra_state.py").is_file() for place in places):
        return ()
    return (
        f"Transformer Engine keeps scales of --fp8-recipe delayed as a pickle, and reads it only with {_ALLOWED}=1: "
        "set it if you trust the checkpoints of this run, else they cannot be loaded",
    )


def mask_faults(args: Namespace, platform: str) -> Iterator[str]:
    """Yield what does not hold where batches have masks of their own. Transformer Engine's layers do not read them."""
    stages = getattr(args, "pipeline_model_parallel_size", 1)
    if stages > 1 and takes_masks(args, platform):
        yield (
            f"--reset-attention-mask with --pipeline-model-parallel-size {stages}: Megatron has masks in the first and "
            "the last stage alone, and layers change stages after a loss: use one stage, or run without --elastic"
        )


def takes_masks(args: Namespace, platform: str = "") -> bool:
    """Return whether layers read masks of the batches. On ``cpu`` none are Transformer Engine's, whatever is asked."""
    masks = getattr(args, "reset_attention_mask", False) and getattr(args, "create_attention_mask_in_dataloader", True)
    return masks and (platform == "cpu" or args.transformer_impl != "transformer_engine")


def packing_faults(args: Namespace) -> Iterator[str]:
    """Yield what does not hold where rows are packed of several sequences, also without ``--elastic``."""
    if not getattr(args, "sft", False):
        return
    if args.micro_batch_size not in (None, 1):
        yield f"--micro-batch-size {args.micro_batch_size} with --sft: a row is packed already: use 1"
    if args.create_attention_mask_in_dataloader:
        yield "--sft has a mask of its own: add --no-create-attention-mask-in-dataloader"
    if args.transformer_impl == "transformer_engine":
        return
    for flag, asked in (
        ("--context-parallel-size", (args.context_parallel_size or 1) > 1),
        ("--multi-latent-attention", getattr(args, "multi_latent_attention", False)),
        ("--mtp-num-layers", getattr(args, "mtp_num_layers", None)),
        ("--window-size", getattr(args, "window_size", None)),
    ):
        if asked:
            yield f"--sft with {flag} is not supported on Megatron's own layers: leave one of the two out"


def layer_faults(args: Namespace, platform: str) -> Iterator[str]:
    """Yield what Megatron's own layers, which are those of a CPU, cannot compute, also without ``--elastic``."""
    if platform != "cpu":
        return
    if "mlp" in (getattr(args, "recompute_modules", None) or ()) and args.add_bias_linear:
        # A bias that is returned is an output of the checkpoint, whose backward then calls itself.
        yield "--recompute-modules mlp never ends on layers with biases: add --disable-bias-linear, or leave out mlp"
    if getattr(args, "moe_latent_size", None):
        yield f"--moe-latent-size {args.moe_latent_size} needs the layers of Transformer Engine: leave it out on a CPU"
    if getattr(args, "fp32_residual_connection", False) and (args.bf16 or args.fp16):
        yield (
            f"--fp32-residual-connection with --{'bf16' if args.bf16 else 'fp16'}: a CPU's norms take inputs and "
            "weights of one type: leave one of the two out"
        )


def prediction_faults(args: Namespace, config: ElasticConfig) -> Iterator[str]:
    """Yield what does not hold where further tokens are predicted."""
    flag = f"--mtp-num-layers {args.mtp_num_layers}"
    if (args.context_parallel_size or 1) > 1:
        yield f"{flag} with --context-parallel-size is not supported with --elastic: leave one of the two out"
    if getattr(args, "heterogeneous_layers_config_path", None):
        yield f"{flag} with --heterogeneous-layers-config-path is not supported with --elastic: leave one of them out"
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if layout is not None and not _predicts_last(layout):
        yield (
            f"{flag} with --pipeline-model-parallel-layout {layout}: --elastic has such layers where the loss is: put "
            "each m into the last stage, in front of L"
        )
    if args.position_embedding_type not in ("rope", "none"):
        yield (
            f"{flag} with --position-embedding-type {args.position_embedding_type}: Megatron has other positions at "
            "each end of the model, which nothing keeps equal: use rope"
        )
    if args.pipeline_model_parallel_size > 1 and not args.untie_embeddings_and_output_weights:
        yield (
            f"{flag} with tied embeddings in several stages makes a checkpoint that Megatron cannot write: add "
            "--untie-embeddings-and-output-weights"
        )
    if config.exact:
        yield f"--elastic-exact adds up gradients use by use, and {flag} uses weights several times: leave one out"


def _predicts_last(layout: str | Sequence[Sequence[str]]) -> bool:
    """Return whether the last chunk of a layout has the layers that predict further tokens; they are all in one."""
    last = layout.rpartition("|")[2] if isinstance(layout, str) else layout[-1]
    return "m" in last or "mtp" in last
