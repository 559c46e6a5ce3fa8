"""Megatron's Muon (``--optimizer muon``, ``dist_muon``) under ``--elastic``.

Owners step whole matrices by Muon and all other parameters by Adam, as Megatron's chained optimizer does. Both names
lead to the same steps here: an owner is one rank anyway. Matrices are those of the launch's tensor-parallel shards,
whatever the cells that compute with them, so Megatron's ``blockwise`` mode holds also after a loss.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.elastic.config import ElasticConfig
from megatron.elastic.mcore.patching.releases import in_range, installed_version
from megatron.elastic.state.muon import Muon

__all__ = ["MUON", "RELEASES", "muon_faults", "muon_of", "qkv_parts", "snapshot_line", "uses_muon"]

MUON = ("muon", "dist_muon")
"""Megatron's names: the second one deals matrices over data-parallel ranks."""

RELEASES = ">=0.17.1,<0.18"
"""Releases of megatron-core whose Muon this is; later ones have other flags and checkpoints."""


def uses_muon(args: Namespace | Mapping[str, Any]) -> bool:
    """Return whether Muon steps the matrices."""
    given = args if isinstance(args, Mapping) else vars(args)
    return given.get("optimizer") in MUON


def muon_of(args: Namespace) -> Muon | None:
    """Return Muon's hyper-parameters; None with another optimizer. Raises ``ValueError`` with the flag."""
    if not uses_muon(args):
        return None
    return Muon(
        momentum=args.muon_momentum,
        nesterov=bool(args.muon_use_nesterov),
        scale=args.muon_scale_mode,
        coefficients=args.muon_coefficient_type,
        iterations=args.muon_num_ns_steps,
        extra_scale=args.muon_extra_scale_factor,
        precision=args.muon_fp32_matmul_prec,
    )


def qkv_parts(args: Namespace) -> tuple[int, ...]:
    """Return the rows of queries, key and value in a group of a fused weight that Muon splits; empty if it does not."""
    if not uses_muon(args) or not args.muon_split_qkv:
        return ()
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    channels = args.kv_channels
    return args.num_attention_heads // groups * channels, channels, channels


def snapshot_line(args: Namespace, config: ElasticConfig) -> str:
    """Return the line that copies receive state, where another mode is the default; else nothing."""
    if not uses_muon(args) or getattr(args, "elastic_snapshot", config.snapshot) == "state":
        return ""
    return (
        f"--optimizer {args.optimizer}: copies receive stepped state (--elastic-snapshot state), since products of "
        "matrices may have other bits on another processor"
    )


def muon_faults(args: Namespace, config: ElasticConfig) -> Iterator[str]:
    """Yield what does not hold with Muon."""
    flag, version = f"--optimizer {args.optimizer}", installed_version()
    if not in_range(version, RELEASES):
        yield f"{flag} of megatron-core {version} is not supported with --elastic: use release 0.17.1, or adam"
        return
    try:
        muon_of(args)
    except ValueError as error:
        yield str(error)
    if config.exact:
        yield f"--elastic-exact repeats steps bit by bit, and products of {flag} need not be equal: leave one out"
    if args.muon_scalar_optimizer != "adam":
        yield f"--muon-scalar-optimizer {args.muon_scalar_optimizer} is not supported with --elastic: use adam"
    if getattr(args, "fp16", False):
        yield f"{flag} with --fp16: Megatron has no Muon with a loss scale: use --bf16"
    if getattr(args, "use_precision_aware_optimizer", False):
        yield f"{flag} with --use-precision-aware-optimizer: Megatron's Muon keeps fp32 state: leave one of them out"
    parts = max(args.tensor_model_parallel_size, getattr(args, "expert_tensor_parallel_size", None) or 1)
    if args.muon_tp_mode != "blockwise" and parts > 1:
        yield (
            f"--muon-tp-mode {args.muon_tp_mode} steps a matrix over {parts} tensor-parallel ranks, and with --elastic "
            "each part has an owner of its own: use blockwise"
        )
    if args.muon_split_qkv:
        yield from _qkv_faults(args, flag)


def _qkv_faults(args: Namespace, flag: str) -> Iterator[str]:
    """Yield why Muon cannot split a fused query, key and value weight into its parts."""
    fix = "add --muon-no-split-qkv"
    grouped = getattr(args, "group_query_attention", False)
    groups = args.num_query_groups if grouped else args.num_attention_heads
    if groups and groups % args.tensor_model_parallel_size:
        yield f"{flag} splits query groups, and {groups} are cut by --tensor-model-parallel-size: {fix}"
    if getattr(args, "attention_output_gate", False):
        yield f"{flag} splits queries, keys and values, and knows no --attention-output-gate: {fix}"
    if getattr(args, "heterogeneous_layers_config_path", None):
        yield f"{flag} splits all layers alike, and --heterogeneous-layers-config-path may differ in heads: {fix}"
