"""The support matrix, checked at start: works, works without ``--elastic``, or refused.

A feature that would give another result, or fail later, is refused before the model is
built, by one line that names the flag and the fix; all refusals are reported together.
Flags that only tune hardware are accepted (``substitutions.ELASTIC_ROWS``). Flags that no
table knows are named in one warning: no flag is ignored silently. ``docs/support.md`` is
written from the same tables:

    python -m megatron.elastic.mcore.args.support --write-docs docs/support.md
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megatron.elastic.config import ElasticConfig
from megatron.elastic.control import env
from megatron.elastic.mcore.args import combinations, flag_table, shared_experts, sub_flags, substitutions
from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.args.exact import exact_faults
from megatron.elastic.mcore.args.features import FEATURES, Feature, Verdict
from megatron.elastic.mcore.args.optimizers import optimizer_faults
from megatron.elastic.mcore.args.overlap import without_overlap
from megatron.elastic.mcore.args.plans import PLANS
from megatron.elastic.mcore.args.unfit import UNFIT, unfit_faults
from megatron.elastic.mcore.args.unread import UNREAD
from megatron.elastic.mcore.args.without_effect import ignored_flags
from megatron.elastic.mcore.args.written_docs import write_or_print
from megatron.elastic.plan.policies.registry import policy_named

__all__ = ["FEATURES", "Feature", "Verdict", "check", "check_launcher", "classify", "docs", "thin_copies"]


def _given(flags: Sequence[str], command_line: Sequence[str]) -> str:
    """Return the one of ``flags`` that was given, else the first."""
    present = {word.split("=")[0] for word in command_line}
    return next((flag for flag in flags if flag in present), flags[0])


def check(
    args: Namespace, config: ElasticConfig, platform: str, command_line: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Raise :class:`BadInput` for all refused flags; return warnings about flags without effect, or in no table.

    ``args``: parsed, not yet validated. ``command_line``: defaults to this process's.
    """
    words = sys.argv[1:] if command_line is None else command_line
    faults = tuple(_refusals(args, config, platform, words))
    if faults:
        raise BadInput(*faults)
    ignored = tuple(ignored_flags(args, words))
    return (*_unknown(words), *ignored, *without_overlap(config)) if args.elastic else ignored


def _refusals(args: Namespace, config: ElasticConfig, platform: str, words: Sequence[str]) -> Iterator[str]:
    for feature in FEATURES:
        if not feature.used(args):
            continue
        flag = _given(feature.flags, words)
        if args.elastic and feature.elastic == "refused":
            yield f"{flag} ({feature.name}) is not supported with --elastic: {feature.fix}"
        elif platform == "cpu" and feature.cpu == "refused" and not (args.elastic and feature.elastic == "works"):
            yield f"{flag} ({feature.name}) needs a GPU: leave it out here"
    yield from unfit_faults(args)
    if args.elastic:
        yield from exact_faults(args, config, platform)
        if platform == "cpu" and config.state == "device":
            yield "--elastic-state device needs an accelerator: a CPU has no other memory than the host's; leave it out"
        yield from _spare_faults(args, config)
        yield from _policy_faults(args, config)
        if (args.context_parallel_size or 1) > 1:
            yield from _context_faults(args, config)
        yield from combinations.precision_faults(args, platform)
        yield from combinations.mask_faults(args, platform)
        yield from optimizer_faults(args, config)
        if getattr(args, "mtp_num_layers", None):
            yield from combinations.prediction_faults(args, config)
        yield from _expert_part_faults(args)
        yield from shared_experts.balance_faults(args, config)
        if (args.expert_model_parallel_size or 1) > 1:
            yield from shared_experts.faults(args, config, platform)
    if args.num_experts:
        yield from _expert_faults(args, platform)
    yield from combinations.layer_faults(args, platform)
    yield from combinations.packing_faults(args)


def _policy_faults(args: Namespace, config: ElasticConfig) -> Iterator[str]:
    needed = policy_named(config.policy).smaller_cells == "needs" and args.tensor_model_parallel_size > 1
    if needed and config.tensor == "park":
        yield (
            f"--elastic-policy {config.policy} computes with smaller tensor-parallel groups: "
            "use --elastic-tensor live-on"
        )


def _expert_faults(args: Namespace, platform: str) -> Iterator[str]:
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        yield "--num-experts with tensor parallelism trains with --sequence-parallel only: add it"
    if platform == "cpu" and args.add_bias_linear:
        yield "--num-experts: Megatron's own layers (a CPU's) have experts without biases: add --disable-bias-linear"


def _expert_part_faults(args: Namespace) -> Iterator[str]:
    """Yield why experts cannot have a tensor-parallel size of their own."""
    tensor, parts = args.tensor_model_parallel_size, getattr(args, "expert_tensor_parallel_size", None)
    if not args.num_experts or parts in (None, tensor):
        return
    size = f"--expert-tensor-parallel-size {parts}"
    if tensor % parts:
        yield f"{size} is not elastic: use a divisor of {tensor}, the tensor-parallel size"
    elif (args.expert_model_parallel_size or 1) == 1:
        yield f"{size} with --elastic needs an --expert-model-parallel-size above 1: leave it out"


def _context_faults(args: Namespace, config: ElasticConfig) -> Iterator[str]:
    """Yield what does not hold where ranks share the sequence."""
    size, tensor = f"--context-parallel-size {args.context_parallel_size}", args.tensor_model_parallel_size
    parts = args.context_parallel_size * tensor
    if getattr(args, "multi_latent_attention", False):
        yield f"{size} with --multi-latent-attention is not supported with --elastic: leave one of the two out"
    if config.exact:
        yield f"--elastic-exact is not supported beside {size}, where a rank has a part of each sample: leave one out"
    if getattr(args, "window_size", None):
        yield f"{size} with --window-size: Megatron's own layers mask by the place in a tensor: leave one of them out"
    if args.sequence_parallel and args.seq_length and args.seq_length % parts:
        yield (
            f"--sequence-parallel cuts the part of each of {size} again: --seq-length {args.seq_length} must be a "
            f"multiple of {parts}"
        )
    if config.policy != "elaswave":
        yield f"--elastic-policy {config.policy} with {size} is not tested: leave out the policy"


def _spare_faults(args: Namespace, config: ElasticConfig) -> Iterator[str]:
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size or 1
    if config.spares % (tensor * context):
        beside = f" × --context-parallel-size {context}" if context > 1 else ""
        yield (
            f"--elastic-spares {config.spares} is not a multiple of --tensor-model-parallel-size {tensor}{beside}: "
            "spares take the place of whole tensor-parallel groups"
        )


def check_launcher(environ: Mapping[str, str], argv: Sequence[str]) -> None:
    """Raise :class:`BadInput` if ``--elastic`` was not started by the elastic launcher.

    The text has the command to use, derived from the variables of torchrun or a shell in ``environ``.
    """
    if env.RUN_ID in environ:
        return
    local, world = environ.get("LOCAL_WORLD_SIZE", "1"), environ.get("WORLD_SIZE", "1")
    nodes = int(world) // max(1, int(local))
    where = f"--nproc-per-node {local}"
    if nodes > 1:
        first, port = environ.get("MASTER_ADDR", "HOST"), environ.get("MASTER_PORT", "PORT")
        where += f" --nnodes {nodes} --node-rank {environ.get('GROUP_RANK', 'N')}"
        where += f" --master-addr {first} --master-port {port}"
    raise BadInput(
        "--elastic needs the elastic launcher, which takes torchrun's arguments: start the job with "
        f"`python -m megatron.elastic.launch {where} {argv[0]} ...`, or leave out --elastic"
    )


def thin_copies(args: Namespace, config: ElasticConfig) -> tuple[str, ...]:
    """Return warnings about a layout whose first loss stops training, from the flags alone; sizes must be valid."""
    ranks = args.world_size + config.spares
    cell = args.tensor_model_parallel_size * args.context_parallel_size * args.pipeline_model_parallel_size
    back = "training goes back to the checkpoint in --load, or ends with status 4 without one"
    found = []
    if ranks == 1:
        found.append(
            f"one rank has nowhere to keep a copy of its state: when it is lost, {back}; start more ranks "
            "(--nproc-per-node, --nnodes)"
        )
    elif config.mirrors == 0:
        found.append(
            f"--elastic-mirrors 0 keeps no copy of the optimizer state: when any rank is lost, {back}; give "
            "--elastic-mirrors 1 or more"
        )
    elif config.mirrors > ranks - 1:
        found.append(
            f"--elastic-mirrors {config.mirrors} asks for more copies than {ranks} ranks can hold: they hold "
            f"{ranks - 1} besides the owner's; give --elastic-mirrors {ranks - 1}, or start more ranks"
        )
    if args.world_size == cell > 1 and not config.spares:
        gone = "all others wait until it is started again" if config.respawn else "its stage has no rank to compute it"
        found.append(
            f"{cell} ranks are one data-parallel replica (--tensor-model-parallel-size × "
            f"--pipeline-model-parallel-size = {cell}): when one is lost, {gone}; start {2 * cell} ranks or "
            "more, or spares (--elastic-spares)"
        )
    return tuple(found)


def _unknown(words: Sequence[str]) -> tuple[str, ...]:
    """Return one warning that names the given flags that no table knows."""
    flags = dict.fromkeys(word.split("=")[0] for word in words if word.startswith("--"))
    strange = [flag for flag in flags if not flag.startswith(("--elastic", "--no-elastic")) and classify(flag) is None]
    if not strange:
        return ()
    return (
        f"not in the support matrix, passed to Megatron as they are, not verified with --elastic: {', '.join(strange)}",
    )


# ---------------------------------------------------------------- flags


def classify(flag: str) -> tuple[str, str] | None:
    """Return the treatment of a Megatron flag: (on a CPU without ``--elastic``, with ``--elastic``).

    Each is 'honoured', 'substituted', 'no effect' (accepted with one line) or 'refused'. A flag that tunes a feature is
    treated as that one's. ``None``: no table knows the flag.
    """
    for name in sub_flags.spellings(flag):
        tuned = next((feature for feature, tuning in sub_flags.TUNED.items() if name in tuning), name)
        found = _listed(name) or _listed(tuned)
        if found is not None:
            return found
    return None


def _listed(flag: str) -> tuple[str, str] | None:
    """Return the treatment of ``flag`` by the tables that name it."""
    if any(row.flag == flag and row.always for row in UNFIT):
        return "refused", "refused"
    if any(flag in flags for flags in UNREAD.values()):
        return "no effect", "no effect"
    if flag in _ON_GPUS:
        return "refused", "honoured"
    feature = next((row for row in FEATURES if flag in row.flags), None)
    substituted = any(row.flag == flag for row in substitutions.ROWS)
    tuning = any(row.flag == flag for row in substitutions.ELASTIC_ROWS)
    if feature is None and not substituted and not tuning and flag not in flag_table.HONOURED:
        return None
    cpu = "substituted" if substituted else "honoured"
    elastic = "no effect" if tuning else "honoured"
    if feature is not None:
        cpu = {"works": cpu, "refused": "refused", "substituted": "substituted"}[feature.cpu]
        elastic = "refused" if feature.elastic == "refused" else elastic
    return cpu, elastic


_ON_GPUS = frozenset({"--moe-latent-size"})
"""Flags that :func:`~megatron.elastic.mcore.args.combinations.layer_faults` refuses on a CPU."""


# ---------------------------------------------------------------- documentation


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows]


def docs() -> str:
    """Return the support page as Markdown."""
    lines = [
        "# What is supported",
        "",
        "Every start checks its flags. Each refused flag prints one line, and the run ends with exit status 1.",
        "`--elastic-check` makes the same checks without a run. This page is written by",
        "`python -m megatron.elastic.mcore.args.support --write-docs docs/support.md`.",
        "",
        "## Features",
        "",
        *_table(
            ("feature", "flags", "CPU", "with --elastic", ""),
            (
                (row.name, " ".join(f"`{flag}`" for flag in row.flags[:4]), row.cpu, row.elastic, row.fix)
                for row in FEATURES
            ),
        ),
        "",
        "## What is planned for what is refused?",
        "",
        *_table(("refused with --elastic", "plan"), PLANS.items()),
        "",
        "## Which flags are substituted where a dependency is missing?",
        "",
        "The start prints them as a table; `--elastic-strict-flags` refuses them instead.",
        "",
        *_table(
            ("flag", "needs", "used instead", "why"),
            ((f"`{row.flag}`", ", ".join(row.needs), str(row.used), row.reason) for row in substitutions.ROWS),
        ),
        "",
        "## Which flags have no effect under --elastic?",
        "",
        "Each is accepted with one line: it tunes hardware, or the engine has its own setting.",
        "",
        *_table(("flag", "why"), ((f"`{row.flag}`", row.reason) for row in substitutions.ELASTIC_ROWS)),
        "",
        "## Which flags tune a feature?",
        "",
        "Each has the treatment of the flag that turns the feature on, and no effect without it.",
        "",
        *_table(
            ("feature", "flags"),
            ((f"`{on}`", " ".join(f"`{flag}`" for flag in flags)) for on, flags in sub_flags.TUNED.items()),
        ),
        "",
        "## Which flags are refused without --elastic too?",
        "",
        "Megatron itself fails with them, or trains with weights that have no values.",
        "",
        *_table(("flag", "why"), ((f"`{row.flag}`", row.fix) for row in UNFIT)),
        "",
        "## Which flags have no effect on the pretraining of a GPT?",
        "",
        "Nothing that trains a GPT reads them. Those that are given are named in one line.",
        "",
        *_table(("for", "flags"), ((name, " ".join(f"`{flag}`" for flag in flags)) for name, flags in UNREAD.items())),
        "",
        "## The most used flags",
        "",
        "The most frequent flags of Megatron-LM's GPT configurations and example scripts, in that order.",
        "",
        *_table(
            ("flag", "CPU", "with --elastic"),
            ((f"`{flag}`", *(classify(flag) or ("?", "?"))) for flag in flag_table.MOST_USED),
        ),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Write the support page (``--write-docs PATH``) or print it."""
    return write_or_print("megatron.elastic.mcore.args.support", __doc__, docs, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
