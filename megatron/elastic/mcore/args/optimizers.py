"""Which of Megatron's optimizers (``--optimizer``) owners step, and what does not hold with each.

Lion is that of megatron-core 0.18 and 0.19 (``core/optimizer/emerging_optimizers.py``): it steps matrices, and Adam all
other parameters; its coefficients are those of Adam, since ``--lion-beta1`` and ``--lion-beta2`` are meant for what
Muon does not step.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron.elastic.config import ElasticConfig
from megatron.elastic.mcore.args.muon import MUON, muon_faults, uses_muon
from megatron.elastic.mcore.patching.releases import in_range, installed_version
from megatron.elastic.state.lion import Lion

__all__ = ["LION_RELEASES", "OF_MATRICES", "STEPPED", "lion_of", "optimizer_faults"]

OF_MATRICES = ("lion", *MUON)
"""Megatron's names of what steps matrices, beside which Adam steps the other parameters."""

STEPPED = ("adam", "sgd", *OF_MATRICES)
"""Megatron's names of what owners step."""

LION_RELEASES = ">=0.18"
"""Releases of megatron-core that have Lion; earlier ones know its name alone."""


def lion_of(args: Namespace) -> Lion | None:
    """Return Lion's coefficients; None with another optimizer."""
    return Lion(args.adam_beta1, args.adam_beta2) if args.optimizer == "lion" else None


def optimizer_faults(args: Namespace, config: ElasticConfig) -> Iterator[str]:
    """Yield why owners cannot step as ``--optimizer`` asks, one line a fault."""
    if uses_muon(args):
        yield from muon_faults(args, config)
    elif args.optimizer == "lion":
        yield from _lion_faults(args)


def _lion_faults(args: Namespace) -> Iterator[str]:
    flag, version = "--optimizer lion", installed_version()
    if not in_range(version, LION_RELEASES):
        yield f"{flag}: megatron-core {version} knows its name alone: use release 0.18 or later, or adam"
    if getattr(args, "fp16", False):
        yield f"{flag} with --fp16 is not supported with --elastic: use --bf16"
    if getattr(args, "use_precision_aware_optimizer", False):
        yield f"{flag} with --use-precision-aware-optimizer: its momentum is fp32 with --elastic: leave one of them out"
