"""Megatron's flags for communication behind computation, as settings of the engine.

Megatron gives them to its gradient buffers, which ``--elastic`` does without. So they become the settings of
:class:`ElasticConfig` that mean the same, and are off for Megatron's own code, before it validates or uses them.
"""

from __future__ import annotations

from argparse import Namespace

from megatron.elastic.config import ElasticConfig

__all__ = ["take_over_overlap", "without_overlap"]


def take_over_overlap(args: Namespace) -> None:
    """Set ``elastic_overlap`` and ``elastic_bucket_elements`` from Megatron's flags, and reset those. Idempotent.

    Only with ``--elastic``: otherwise Megatron's own code acts on its flags.
    """
    if not getattr(args, "elastic", False):
        return
    asked = getattr(args, "elastic_overlap", "none")
    reduce = asked in ("reduce", "both") or bool(getattr(args, "overlap_grad_reduce", False))
    gather = asked in ("gather", "both") or bool(getattr(args, "overlap_param_gather", False))
    names = {(False, False): "none", (True, False): "reduce", (False, True): "gather", (True, True): "both"}
    args.elastic_overlap = names[reduce, gather]
    args.overlap_grad_reduce = args.overlap_param_gather = False
    if getattr(args, "ddp_bucket_size", None) is not None:
        args.elastic_bucket_elements, args.ddp_bucket_size = args.ddp_bucket_size, None


def without_overlap(config: ElasticConfig) -> tuple[str, ...]:
    """Return a line if gradients are asked to be reduced behind the backward and are not."""
    if not config.exact or config.overlap not in ("reduce", "both"):
        return ()
    return (
        f"--elastic-overlap {config.overlap} with --elastic-exact: gradients are reduced after the backward, since a "
        "step whose gradients do not fit into its integers is computed again",
    )
