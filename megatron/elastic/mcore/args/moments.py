"""The types of Adam's moments (``--use-precision-aware-optimizer``) under ``--elastic``.

Megatron's flags choose an optimizer of Transformer Engine, which computes a step in fp32 and keeps each moment in the
type asked for. The engine's own step does the same with bf16: the moment that it keeps is rounded to a value of bf16.
Memory stays that of fp32.

Source: ``transformer_engine/pytorch/optimizers/fused_adam.py`` (2.20).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

__all__ = ["moment_faults", "take_over_moments"]

_FLAGS = {"exp_avg_dtype": "--exp-avg-dtype", "exp_avg_sq_dtype": "--exp-avg-sq-dtype"}


def moment_faults(args: Namespace) -> Iterator[str]:
    """Yield the types that the engine does not keep."""
    for name, flag in _FLAGS.items():
        if (asked := getattr(args, name)) not in ("fp32", "bf16"):
            yield f"{flag} {asked} is not supported with --elastic: use bf16 or fp32"
    if args.main_params_dtype != "fp32":
        yield f"--main-params-dtype {args.main_params_dtype} is not supported with --elastic: leave it out (fp32)"


def take_over_moments(args: Namespace) -> None:
    """Set ``args.elastic_moments`` (types of both moments) from Megatron's flags, and reset those.

    Megatron would otherwise ask for Transformer Engine's optimizer. Before Megatron validates ``args``.
    """
    args.elastic_moments = "fp32", "fp32"
    if getattr(args, "use_precision_aware_optimizer", False):
        args.elastic_moments = args.exp_avg_dtype, args.exp_avg_sq_dtype
        args.use_precision_aware_optimizer = False
        for name in _FLAGS:
            setattr(args, name, "fp32")
