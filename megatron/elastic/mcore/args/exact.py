"""Flags that exact mode (``--elastic-exact``) does not go with. Each function yields one line a fault."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator

from megatron.elastic.config import ElasticConfig
from megatron.elastic.mcore.args import substitutions
from megatron.elastic.plan.policies.registry import policy_named

__all__ = ["exact_faults"]


def exact_faults(args: Namespace, config: ElasticConfig, platform: str) -> Iterator[str]:
    """Yield what does not hold in exact mode; nothing without it."""
    if not config.exact:
        return
    if platform != "cpu" and not args.deterministic_mode:
        yield (
            "--elastic-exact needs --deterministic-mode on a device, whose kernels add up in any order without it: "
            "add it (with CUBLAS_WORKSPACE_CONFIG=:4096:8 and NCCL_ALGO=Ring in the environment)"
        )
    if platform == "cuda" and args.deterministic_mode:
        yield from _unordered_libraries(args)
    if not policy_named(config.policy).keeps_batch:
        yield (
            f"--elastic-exact with --elastic-policy {config.policy}, which leaves samples out after a loss: "
            "take torchft-batch, or another policy"
        )


def _unordered_libraries(args: Namespace) -> Iterator[str]:
    """Yield the libraries of an NVIDIA GPU that the environment leaves free to add up in any order."""
    needed: dict[str, tuple[str, tuple[str, ...]]] = {"cuBLAS": ("CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8"))}
    engine = "transformer_engine"
    if args.transformer_impl == engine and substitutions.Installed.detect("cuda").has(engine):
        needed["Transformer Engine's attention"] = ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", ("0",))
    for library, (name, values) in needed.items():
        if os.environ.get(name) not in values:
            yield f"--elastic-exact: {library} adds up in one order with {name}={values[0]} alone: export it"
