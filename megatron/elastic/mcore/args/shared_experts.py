"""Refusals of flags where ranks share experts (``--expert-model-parallel-size`` above 1), one line each."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron.elastic.config import ElasticConfig

__all__ = ["balance_faults", "faults"]

_PLAIN = "run without --elastic"


def balance_faults(args: Namespace, config: ElasticConfig) -> Iterator[str]:
    """Yield why experts cannot move according to their load."""
    flag, cell = "--elastic-expert-balance", args.tensor_model_parallel_size * (args.context_parallel_size or 1)
    if config.expert_balance == "off":
        return
    if (args.expert_model_parallel_size or 1) == 1:
        yield f"{flag} {config.expert_balance} moves experts that ranks share: add --expert-model-parallel-size"
        return
    if _ranks_with_all_experts(args) <= cell:
        yield (
            f"{flag} {config.expert_balance} moves experts between groups of {cell} ranks that share a micro-batch, "
            "and each of these groups has all experts: leave it out, or choose a larger --expert-model-parallel-size"
        )
    others = args.num_experts - args.num_experts // (args.expert_model_parallel_size or 1)
    if config.replicas_of_a_rank > others > 0:
        yield (
            f"--elastic-expert-replicas {config.expert_replicas}: other ranks have {others} experts of a layer, and a "
            f"rank has a replica of each once: use {others} or fewer"
        )


def _ranks_with_all_experts(args: Namespace) -> int:
    parts = getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size
    return int(args.expert_model_parallel_size * parts)


def faults(args: Namespace, config: ElasticConfig, platform: str) -> Iterator[str]:
    """Yield what does not hold where ranks share experts."""
    size = f"--expert-model-parallel-size {args.expert_model_parallel_size}"
    if config.exact:
        yield f"--elastic-exact adds up gradients by micro-batch, and with {size} an expert sees several: leave one out"
    if config.policy != "elaswave":
        yield f"--elastic-policy {config.policy} with {size} is not tested: leave out the policy"
    cell, sharing = args.tensor_model_parallel_size * (args.context_parallel_size or 1), _ranks_with_all_experts(args)
    if sharing % cell and cell % sharing:
        yield (
            f"{size}: {sharing} ranks have all experts together. With --elastic that must be a multiple or a divisor "
            f"of {cell}, the ranks that share a micro-batch: choose another size"
        )
    adjacent = getattr(args, "use_tp_pp_dp_mapping", False) and (args.pipeline_model_parallel_size or 1) > 1
    if adjacent and sharing != cell:
        yield f"--use-tp-pp-dp-mapping with {size} puts a pipeline's experts on ranks of another: leave one out"
    if platform != "cpu" and args.transformer_impl != "local":  # a CPU has no others
        yield f"{size} with --elastic needs Megatron's own layers: add --transformer-impl local, or {_PLAIN}"
    if platform != "cpu" and getattr(args, "moe_grouped_gemm", False):
        yield f"--moe-grouped-gemm keeps the experts of a rank in one weight, which {size} deals out: leave it out"
