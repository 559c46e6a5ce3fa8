"""Flags that the installed release of Megatron takes and ignores: each given one is named in a warning.

Megatron ignores them in silence, with and without ``--elastic``. Those that other models have (``unread``) are named
in one line.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence

from megatron.elastic.mcore.args.sub_flags import spellings
from megatron.elastic.mcore.args.unread import RL, UNREAD
from megatron.elastic.mcore.patching.releases import in_range, installed_version

__all__ = ["ignored_flags"]

RAMPS_UP = "<0.18"
"""Releases of megatron-core that hand --rampup-batch-size to their calculator (``training/global_vars.py``)."""


def ignored_flags(args: Namespace, command_line: Sequence[str]) -> Iterator[str]:
    """Yield a line for each flag of ``command_line`` without an effect."""
    given, version = {word.split("=")[0] for word in command_line}, installed_version()
    if args.optimizer == "lion":
        for flag in sorted(given & {"--lion-beta1", "--lion-beta2"}):
            yield f"{flag} has no effect: Megatron's --optimizer lion takes {flag.replace('lion', 'adam')}, as here"
    flag = "--rampup-batch-size"
    if flag in given and not in_range(version, RAMPS_UP):
        yield f"{flag} has no effect: megatron-core {version} does not read it; use --step-batch-size-schedule"
    unread = _unread(args, given)
    if unread:
        yield f"no effect on the pretraining of a GPT: {', '.join(unread)}"


def _unread(args: Namespace, given: Iterable[str]) -> list[str]:
    """Return the given flags that nothing reads. Those of reinforcement learning are read where it trains."""
    learns = getattr(args, "perform_rl_step", False)
    listed = {flag for subject, flags in UNREAD.items() if subject != RL or not learns for flag in flags}
    return sorted(flag for flag in given if listed & set(spellings(flag)))
