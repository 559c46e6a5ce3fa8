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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.elastic.config import ElasticConfig
from megatron.elastic.control import env
from megatron.elastic.mcore.args import combinations, flag_table, shared_experts, substitutions
from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.args.exact import exact_faults
from megatron.elastic.mcore.args.muon import uses_muon
from megatron.elastic.mcore.args.optimizers import STEPPED, optimizer_faults
from megatron.elastic.mcore.args.overlap import without_overlap
from megatron.elastic.mcore.args.plans import PLANS
from megatron.elastic.mcore.args.without_effect import ignored_flags
from megatron.elastic.mcore.args.written_docs import write_or_print
from megatron.elastic.plan.policies.registry import policy_named

__all__ = ["FEATURES", "Feature", "Verdict", "check", "check_launcher", "classify", "docs", "thin_copies"]

Verdict = Literal["works", "refused", "substituted"]


@dataclass(frozen=True)
class Feature:
    """One row: the flags of a feature, and its treatment on a CPU without ``--elastic`` and with it anywhere."""

    name: str
    flags: tuple[str, ...]
    used: Callable[[Namespace], bool]
    cpu: Verdict
    elastic: Verdict
    fix: str
    """Why it is refused and what to do instead; for what works, a remark."""


def _any(*attributes: str) -> Callable[[Namespace], bool]:
    """Return a test whether any of these arguments is set."""
    return lambda args: any(bool(getattr(args, name, None)) for name in attributes)


def _other_than(attribute: str, *values: Any) -> Callable[[Namespace], bool]:
    """Return a test whether an argument that this Megatron has is none of ``values``."""
    return lambda args: getattr(args, attribute, values[0]) not in values


_GPU = "run it on a GPU"
_PLAIN = "run without --elastic"

# A table: one row a line, which the formatter would break up.
# fmt: off
FEATURES: tuple[Feature, ...] = (
    Feature("tensor, pipeline and data parallelism",
            ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
            lambda args: True, "works", "works",
            "after a loss stages may be uneven, and tensor-parallel groups smaller (--elastic-tensor)"),
    Feature("sequence parallelism", ("--sequence-parallel",), _any("sequence_parallel"), "works", "works",
            "it is off in smaller groups whose size does not divide the sequence"),
    Feature("distributed optimizer", ("--use-distributed-optimizer",), _any("use_distributed_optimizer"), "works",
            "works", "with --elastic the optimizer is always sharded, with mirrors"),
    Feature("activation recompute", ("--recompute-granularity", "--recompute-activations", "--recompute-method",
                                     "--recompute-num-layers"),
            _any("recompute_granularity", "recompute_activations"), "works", "works", ""),
    Feature("bf16", ("--bf16",), _any("bf16"), "works", "works", ""),
    Feature("fp16 with loss scaling", ("--fp16",), _any("fp16"), "works", "works",
            "on a CPU about ten times slower than fp32: use --bf16 there"),
    Feature("virtual pipeline stages", ("--num-layers-per-virtual-pipeline-stage",
                                        "--num-virtual-stages-per-pipeline-rank"),
            _any("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"), "works", "works",
            "with --elastic Megatron's interleaved order until a loss, and again when all are back"),
    Feature("context parallelism", ("--context-parallel-size", "--hierarchical-context-parallel-sizes",
                                    "--cp-comm-type"),
            lambda args: (args.context_parallel_size or 1) > 1, "refused", "works",
            "on Megatron's own layers with --elastic only; a cell that loses a rank cuts the sequence anew; "
            "where ranks share experts it waits"),
    Feature("context parallelism that varies by batch", ("--hybrid-context-parallel",),
            _any("hybrid_context_parallel"), "refused", "refused", f"its batches need Transformer Engine: {_GPU}, "
            f"{_PLAIN}"),
    Feature("mixture of experts", ("--num-experts", *flag_table.MOE), _any("num_experts"), "works", "works",
            "with --elastic layers are Megatron's own, and a micro-batch is never divided"),
    Feature("expert parallelism", ("--expert-model-parallel-size",),
            lambda args: (args.expert_model_parallel_size or 1) > 1, "works", "works",
            "with --elastic layers stay in their stages, and a tensor-parallel group that loses a rank waits"),
    Feature("experts with another tensor-parallel size than attention", ("--expert-tensor-parallel-size",),
            lambda args: getattr(args, "expert_tensor_parallel_size", None)
            not in (None, args.tensor_model_parallel_size), "works", "works",
            "with --elastic a divisor of the tensor-parallel size"),
    Feature("layers with and without experts", ("--moe-layer-freq",),
            lambda args: bool(args.num_experts) and getattr(args, "moe_layer_freq", 1) not in (1, None), "works",
            "works", "with --elastic layers of Megatron's own specification"),
    Feature("balancing experts over the global batch", ("--moe-router-load-balancing-type",),
            lambda args: bool(args.num_experts)
            and "global_aux_loss" in (getattr(args, "moe_router_load_balancing_type", None) or ()), "works", "refused",
            "that loss depends on which rank computed which micro-batch before: use aux_loss or seq_aux_loss"),
    Feature("balancing experts by a bias", ("--moe-router-enable-expert-bias",), _any("moe_router_enable_expert_bias"),
            "works", "works", "with --elastic each step's record has the bias, and counts are exact in bf16 too"),
    Feature("noise in the router's input", ("--moe-input-jitter-eps",), _any("moe_input_jitter_eps"), "works",
            "works", "with --elastic drawn by sample, as dropout is"),
    Feature("experts chosen by chance", ("--moe-router-force-load-balancing", "--moe-router-force-biased"),
            lambda args: bool(getattr(args, "moe_router_force_load_balancing", False))
            or getattr(args, "moe_router_force_biased", None) is not None, "works", "refused",
            f"each rank draws by itself, so a step that is computed again has other experts: {_PLAIN}"),
    Feature("losses of experts by layer", ("--moe-per-layer-logging",), _any("moe_per_layer_logging"), "works",
            "works", "with --elastic in TensorBoard, W&B and the event log"),
    Feature("experts from a dense checkpoint", ("--moe-use-upcycling",), _any("moe_use_upcycling"), "works", "refused",
            "convert the checkpoint first, without --elastic"),
    Feature("multi-token prediction", ("--mtp-num-layers", "--mtp-loss-scaling-factor"), _any("mtp_num_layers"),
            "works", "works", "a tensor-parallel group that loses a rank does not compute until it is whole"),
    Feature("multi-latent attention", ("--multi-latent-attention", *flag_table.MLA), _any("multi_latent_attention"),
            "works", "works", "a tensor-parallel group that loses a rank does not compute until it is whole"),
    Feature("linear and sparse attention variants", ("--experimental-attention-variant", *flag_table.LINEAR_ATTENTION),
            _any("experimental_attention_variant"), "refused", "refused",
            f"needs GPU kernels: {_GPU}, {_PLAIN}"),
    Feature("hybrid (state-space) models", ("--hybrid-layer-pattern", "--hybrid-override-pattern"),
            _any("hybrid_layer_pattern", "hybrid_override_pattern"), "refused", "refused",
            f"needs GPU kernels: {_GPU}, {_PLAIN}, with a script for such models"),
    Feature("layers of different shapes", ("--heterogeneous-layers-config-path",),
            _any("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"), "works", "works",
            "a tensor-parallel group that loses a rank does not compute until it is whole"),
    Feature("torch FSDP2", ("--use-torch-fsdp2",), _any("use_torch_fsdp2"), "refused", "refused",
            "it shards parameters in its own way: use --use-distributed-optimizer"),
    Feature("Megatron FSDP", ("--use-megatron-fsdp", "--data-parallel-sharding-strategy"),
            _any("use_megatron_fsdp"), "refused", "refused",
            "it shards parameters in its own way: use --use-distributed-optimizer"),
    Feature("FP8", ("--fp8-format", *flag_table.FP8),
            lambda args: _any("fp8")(args) and _other_than("fp8_recipe", "custom")(args),
            "refused", "works", "in dense layers of Transformer Engine; with --fp8-recipe delayed scales change once a "
            "step; of the recipes delayed alone was run on a GPU"),
    Feature("FP8 by a quantizer of one's own", ("--fp8-quantizer-factory",),
            lambda args: _any("fp8")(args) and not _other_than("fp8_recipe", "custom")(args),
            "refused", "refused", "it may keep what no other rank knows: use --fp8-recipe delayed, tensorwise, "
            "blockwise or mxfp8"),
    Feature("FP4", ("--fp4-format", "--fp4-param-gather"), _any("fp4", "fp4_param_gather"), "refused", "refused",
            f"needs Transformer Engine on a GPU: use --bf16, or {_PLAIN}"),
    Feature("CUDA graphs", ("--cuda-graph-impl", "--enable-cuda-graph", "--external-cuda-graph"),
            lambda args: _any("enable_cuda_graph", "external_cuda_graph")(args)
            or _other_than("cuda_graph_impl", "none", None)(args), "substituted", "refused",
            f"a captured graph cannot follow when shapes and groups change: leave it out, or {_PLAIN}"),
    Feature("batch-size ramp-up", ("--rampup-batch-size", "--step-batch-size-schedule"),
            _any("rampup_batch_size", "step_batch_size_schedule"), "works", "works",
            "plans follow the number of samples; from Megatron 0.18 on by --step-batch-size-schedule, since it ignores "
            "--rampup-batch-size then"),
    Feature("Lion", ("--lion-beta1", "--lion-beta2"),
            lambda args: getattr(args, "optimizer", None) == "lion", "works", "works",
            "of Megatron 0.18 and later, which takes --adam-beta1 and --adam-beta2 for it; with --elastic no package "
            "emerging-optimizers is needed"),
    Feature("SOAP, and Muon with an adaptive step", ("--optimizer",), _other_than("optimizer", *STEPPED),
            "works", "refused", f"owners do not step it: use adam, lion, muon or sgd, or {_PLAIN}"),
    Feature("learning rates by width (muP)", ("--use-mup", *flag_table.MUP), _any("use_mup"), "works", "works", ""),
    Feature("clipped or logged attention logits", ("--qk-clip", "--qk-clip-alpha", "--qk-clip-threshold",
                                                   "--log-max-attention-logit"),
            _any("qk_clip", "log_max_attention_logit"), "refused", "refused",
            f"they are read and clipped in Megatron's own step, which --elastic replaces: {_GPU}, {_PLAIN}"),
    Feature("Muon", ("--muon-tp-mode", "--muon-scalar-optimizer"),
            uses_muon, "works", "works",
            "that of Megatron 0.17; with --elastic copies receive state, tensor-parallel parts are stepped blockwise, "
            "and no package emerging-optimizers is needed"),
    Feature("low-precision optimizer state", ("--use-precision-aware-optimizer", "--main-params-dtype",
                                              "--main-grads-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype"),
            _any("use_precision_aware_optimizer"), "refused", "works",
            "with --elastic moments in bf16 or fp32, in memory for fp32; gradients and masters are fp32"),
    Feature("checkpoints of FSDP and older formats", ("--ckpt-format",),
            _other_than("ckpt_format", "torch_dist", "torch"), "works", "refused", "use --ckpt-format torch_dist"),
    Feature("conversion of a checkpoint's format", ("--ckpt-convert-format", "--ckpt-convert-save"),
            _any("ckpt_convert_format"), "works", "refused", "convert the checkpoint first, without --elastic"),
    Feature("gradients in files", ("--save-wgrads-interval", "--save-dgrads-interval"),
            _any("save_wgrads_interval", "save_dgrads_interval"), "works", "refused",
            f"Megatron's own step writes them, which --elastic replaces: {_PLAIN}"),
    Feature("node-local checkpoints", ("--non-persistent-ckpt-type",),
            lambda args: getattr(args, "non_persistent_ckpt_type", None) == "local", "works", "refused",
            "copies in memory replace them (--elastic-mirrors): leave it out"),
    Feature("other data orders", ("--dataloader-type",),
            lambda args: getattr(args, "dataloader_type", None) in ("external", "batch"), "works", "refused",
            "any rank must be able to read any sample by its number: use --dataloader-type single or cyclic"),
    Feature("filling in the middle", ("--fim-data",), _any("fim_data"), "works", "refused",
            "the cut of a sample depends on those read before, and a step may be read again: prepare samples ahead"),
    Feature("skipped iterations", ("--iterations-to-skip", "--result-rejected-tracker-filename"),
            _any("iterations_to_skip", "result_rejected_tracker_filename"), "works", "works",
            "with --elastic every rank must find the same iterations in the tracker file, to which no rank adds"),
    Feature("several or full validation sets", ("--full-validation", "--multiple-validation-sets"),
            _any("full_validation", "multiple_validation_sets"), "works", "works",
            "with --elastic passes as Megatron 0.17 counts them, and a test set in --eval-iters batches"),
    Feature("ranks that exchange nothing", ("--fake-process-group",), _any("fake_process_group"), "works", "refused",
            f"a job for measurements of one rank: {_PLAIN}"),
    Feature("other rank orders", ("--use-tp-pp-dp-mapping",), _any("use_tp_pp_dp_mapping"), "works", "works",
            "ranks are ordered tensor, pipeline, data"),
    Feature("replicas that start unequal", ("--data-parallel-random-init",), _any("data_parallel_random_init"),
            "works", "refused", "all replicas of a layer must start equal: leave it out"),
    Feature("saved activations spread over ranks", ("--distribute-saved-activations",),
            _any("distribute_saved_activations"), "works", "works", "kept whole in groups that are not the launch's"),
    Feature("another fault-tolerance layer", ("--inprocess-restart", "--enable-ft-package", "--adlr-autoresume"),
            _any("inprocess_restart", "enable_ft_package", "adlr_autoresume"), "works", "refused",
            "two layers would both restart ranks: leave it out"),
    Feature("fine-tuning with packed sequences", ("--sft",), _any("sft"), "works", "works",
            "on Megatron's own layers with a mask; a row stays on one rank"),
    Feature("reinforcement learning", ("--perform-rl-step",), _any("perform_rl_step"), "works", "refused",
            f"its samples are made while it trains, not read by number: {_PLAIN}"),
    Feature("phases of the data", ("--phase-transition-iterations",), _any("phase_transition_iterations"), "works",
            "refused", f"samples are numbered from the begin of the run, not of a phase: {_PLAIN}"),
    Feature("settings from a YAML file", ("--yaml-cfg",), _any("yaml_cfg"), "works", "works",
            "with --elastic the command line has precedence, and a file may leave settings out"),
)
# fmt: on
"""Features in the order of the documentation."""


def _given(flags: Sequence[str], command_line: Sequence[str]) -> str:
    """Return the one of ``flags`` that was given, else the first."""
    present = {word.split("=")[0] for word in command_line}
    return next((flag for flag in flags if flag in present), flags[0])


def check(
    args: Namespace, config: ElasticConfig, platform: str, command_line: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Raise :class:`BadInput` for all refused flags; return warnings about flags that no table knows.

    ``args``: parsed, not yet validated. ``command_line``: defaults to this process's.
    """
    words = sys.argv[1:] if command_line is None else command_line
    faults = tuple(_refusals(args, config, platform, words))
    if faults:
        raise BadInput(*faults)
    return (*_unknown(words), *ignored_flags(args, words), *without_overlap(config)) if args.elastic else ()


def _refusals(args: Namespace, config: ElasticConfig, platform: str, words: Sequence[str]) -> Iterator[str]:
    for feature in FEATURES:
        if not feature.used(args):
            continue
        flag = _given(feature.flags, words)
        if args.elastic and feature.elastic == "refused":
            yield f"{flag} ({feature.name}) is not supported with --elastic: {feature.fix}"
        elif platform == "cpu" and feature.cpu == "refused" and not (args.elastic and feature.elastic == "works"):
            yield f"{flag} ({feature.name}) needs a GPU: leave it out here"
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
    if args.position_embedding_type == "mrope":
        yield f"{size} with --position-embedding-type mrope is not supported with --elastic: use rope"
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

    Each is 'honoured', 'substituted', 'no effect' (accepted with one line) or
    'refused'. ``None``: no table knows the flag.
    """
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
