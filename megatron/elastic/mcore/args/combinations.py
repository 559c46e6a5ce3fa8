"""Flags of Megatron that each work with ``--elastic``, and do not together.

Each function yields one line a fault, which names the flags and the fix.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron.elastic.config import ElasticConfig

__all__ = ["prediction_faults"]


def prediction_faults(args: Namespace, config: ElasticConfig) -> Iterator[str]:
    """Yield what does not hold where further tokens are predicted."""
    flag = f"--mtp-num-layers {args.mtp_num_layers}"
    if getattr(args, "moe_router_enable_expert_bias", False):
        yield f"{flag} with --moe-router-enable-expert-bias is not supported with --elastic: leave one of the two out"
    if (args.context_parallel_size or 1) > 1:
        yield f"{flag} with --context-parallel-size is not supported with --elastic: leave one of the two out"
    if getattr(args, "heterogeneous_layers_config_path", None):
        yield f"{flag} with --heterogeneous-layers-config-path is not supported with --elastic: leave one of them out"
    if getattr(args, "pipeline_model_parallel_layout", None) is not None:
        yield f"{flag} with --pipeline-model-parallel-layout: --elastic has such layers in the last stage, leave it out"
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
