"""Substitutes for Megatron flags that this machine does not support.

Megatron's defaults are for a GPU: Transformer Engine, NCCL, flash attention, fused
kernels. If a flag needs a missing package or device, another implementation of the same
mathematics replaces it, and the table printed at start shows it. A flag whose
substitution would change the result is refused instead (``support``).

Invariants
- Substitution changes parsed arguments before Megatron validates them, so Megatron
  derives its settings from the values that are really used.
- Every substitution has a line in the table; ``--elastic-strict-flags``
  makes any line of :data:`ROWS` an error that names the flags to give.

:data:`ELASTIC_ROWS` is a second table, for ``--elastic``: flags that only tune
Megatron's own gradient buffers, optimizer and streams for the hardware. The engine
has its own; results are the same.
"""

from __future__ import annotations

import importlib.util
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.elastic.mcore.args.bad_input import BadInput

__all__ = ["ELASTIC_ROWS", "ROWS", "Installed", "Rule", "Substituted", "refuse", "substitute", "table"]


@dataclass(frozen=True)
class Installed:
    """The platform's name and the installed packages that a flag may need."""

    platform: str
    packages: frozenset[str] = frozenset()

    @classmethod
    def detect(cls, platform: str) -> Installed:
        """Return the packages that rows need and that are installed, without importing them."""
        names = {package for row in ROWS for package in row.needs if package not in {_DEVICE, *_DEVICES}}
        found = frozenset(name for name in names if importlib.util.find_spec(name) is not None)
        # Transformer Engine and Apex load CUDA kernels: without CUDA they do not work.
        return cls(platform, found if platform == "cuda" else found - _CUDA_ONLY)

    def has(self, need: str) -> bool:
        if need == _DEVICE:
            return self.platform != "cpu"
        return self.platform in _DEVICES[need] if need in _DEVICES else need in self.packages


_DEVICE = "accelerator"
"""Any accelerator, with memory of its own."""
_DEVICES: Mapping[str, frozenset[str]] = {"cuda": frozenset({"cuda"}), "NCCL or HCCL": frozenset({"cuda", "npu"})}
"""Needs that platforms meet. torch_npu gives HCCL the name of NCCL."""
_TE = "transformer_engine"
_GRADIENT_KERNEL = "fused_weight_gradient_mlp_cuda"
_SOFTMAX_KERNELS = "scaled_upper_triang_masked_softmax_cuda"
_NVRX = "nvidia_resiliency_ext"
_DEEPEP = "deep_ep"
"""The package of DeepEP and HybridEP."""
_CUDA_ONLY = frozenset({_TE, _DEEPEP, "apex", "flash_attn", _GRADIENT_KERNEL, _SOFTMAX_KERNELS})


@dataclass(frozen=True)
class Without:
    """The list that a rule sets in place of a user's: the same without one word."""

    word: str

    def __str__(self) -> str:
        return f"without {self.word}"


@dataclass(frozen=True)
class Rule:
    """A rule: set ``attribute`` of the arguments to ``used`` if any of ``needs`` is missing and ``asked(value)`` holds.

    ``spelled``: the command-line flag for ``used``. ``beside``: another attribute; the rule holds only where it is set.
    """

    attribute: str
    flag: str
    needs: tuple[str, ...]
    asked: Callable[[Any], bool]
    used: Any
    spelled: str
    reason: str
    beside: str = ""
    applies: Callable[[Any], bool] = lambda args: True
    """True for arguments with which the rule is of interest."""


def _on(value: Any) -> bool:
    return bool(value)


def _off(value: Any) -> bool:
    return not value


def _is(*names: str) -> Callable[[Any], bool]:
    """Return a test whether a value, or the name of an enum member, is one of ``names``."""
    return lambda value: value is not None and getattr(value, "name", value) in names


def _lists(word: str) -> Callable[[Any], bool]:
    """Return a test whether a value is a list with this word."""
    return lambda value: isinstance(value, list) and word in value


def _switch(attribute: str, flag: str, needs: tuple[str, ...], spelled: str, reason: str) -> Rule:
    """Return a rule that turns a boolean off."""
    return Rule(attribute, flag, needs, _on, False, spelled, reason)


_LEAVE_OUT = "leave it out"

# A table: one row a line, which the formatter would break up.
# fmt: off
ROWS: tuple[Rule, ...] = (
    Rule("transformer_impl", "--transformer-impl", (_TE,), _is("transformer_engine"), "local",
        "--transformer-impl local", "Transformer Engine is not here: megatron.core's own layers, same mathematics"),
    Rule("distributed_backend", "--distributed-backend", ("NCCL or HCCL",), _is("nccl"), "gloo",
        "--distributed-backend gloo", "NCCL needs GPUs"),
    Rule("pipeline_model_parallel_comm_backend", "--pipeline-model-parallel-comm-backend", ("NCCL or HCCL",),
        _is("nccl", "ucc"), None, _LEAVE_OUT, "NCCL and UCC need GPUs: the pipeline uses the common backend"),
    Rule("attention_backend", "--attention-backend", (_TE,), _is("flash", "fused"), "unfused",
        "--attention-backend unfused", "flash and fused attention are Transformer Engine's kernels"),
    _switch("use_flash_attn", "--use-flash-attn", ("flash_attn",), _LEAVE_OUT, "flash-attn needs a GPU"),
    Rule("use_cpu_initialization", "--use-cpu-initialization", (_DEVICE,), _off, True, "--use-cpu-initialization",
        "weights live on the CPU: initialised whole, then cut"),
    _switch("gradient_accumulation_fusion", "--no-gradient-accumulation-fusion", (_GRADIENT_KERNEL,),
            "--no-gradient-accumulation-fusion", "Apex's fused weight-gradient kernel is not here"),
    Rule("no_persist_layer_norm", "--no-persist-layer-norm", ("apex",), _off, True, "--no-persist-layer-norm",
        "Apex's persistent layer-norm kernel is not here"),
    _switch("bias_gelu_fusion", "--no-bias-gelu-fusion", ("cuda",), "--no-bias-gelu-fusion", "compiled for GPUs"),
    _switch("bias_swiglu_fusion", "--no-bias-swiglu-fusion", ("cuda",), "--no-bias-swiglu-fusion",
            "compiled for GPUs"),
    _switch("bias_dropout_fusion", "--no-bias-dropout-fusion", ("cuda",), "--no-bias-dropout-fusion",
            "compiled for GPUs"),
    _switch("masked_softmax_fusion", "--no-masked-softmax-fusion", (_SOFTMAX_KERNELS,), "--no-masked-softmax-fusion",
            "Apex's fused softmax kernels are not here"),
    _switch("apply_rope_fusion", "--no-rope-fusion", (_TE,), "--no-rope-fusion",
            "Transformer Engine's fused rotary kernel is not here"),
    Rule("cross_entropy_fusion_impl", "--cross-entropy-fusion-impl", (_TE,), _is("te"), "native",
        "--cross-entropy-fusion-impl native", "Transformer Engine's cross-entropy kernel is not here"),
    _switch("fused_residual_rmsnorm", "--fused-residual-rmsnorm", (_TE,), _LEAVE_OUT,
            "Transformer Engine's kernel is not here"),
    _switch("use_te_activation_func", "--use-te-activation-func", (_TE,), _LEAVE_OUT,
            "Transformer Engine's kernel is not here"),
    _switch("mla_down_proj_fusion", "--mla-down-proj-fusion", (_TE,), _LEAVE_OUT,
            "Transformer Engine's kernel is not here"),
    _switch("te_rng_tracker", "--te-rng-tracker", (_TE,), _LEAVE_OUT, "Transformer Engine's generator is not here"),
    _switch("moe_grouped_gemm", "--moe-grouped-gemm", (_TE,), _LEAVE_OUT,
            "experts run one after the other: same mathematics"),
    Rule("recompute_modules", "--recompute-modules moe_act", (_TE,), _lists("moe_act"), Without("moe_act"), _LEAVE_OUT,
        "only --moe-grouped-gemm recomputes the activations of experts",
        applies=lambda args: not getattr(args, "moe_grouped_gemm", False)),
    Rule("recompute_modules", "--recompute-modules layernorm", (_TE,), _lists("layernorm"), Without("layernorm"),
        _LEAVE_OUT, "Megatron recomputes norms with Transformer Engine alone"),
    _switch("moe_permute_fusion", "--moe-permute-fusion", (_TE,), _LEAVE_OUT,
            "Transformer Engine's kernel is not here"),
    _switch("moe_router_fusion", "--moe-router-fusion", (_TE,), _LEAVE_OUT, "Transformer Engine's kernel is not here"),
    Rule("moe_token_dispatcher_type", "--moe-token-dispatcher-type flex", (_DEEPEP,), _is("flex"), "alltoall",
        "--moe-token-dispatcher-type alltoall", "the kernels of DeepEP and HybridEP are not here: same mathematics"),
    _switch("moe_enable_deepep", "--moe-enable-deepep", (_DEEPEP,), _LEAVE_OUT, "DeepEP's kernels are not here"),
    Rule("symmetric_ar_type", "--symmetric-ar-type", (_TE,), _on, None, _LEAVE_OUT,
        "Transformer Engine's sums in symmetric memory are not here"),
    _switch("tp_comm_overlap", "--tp-comm-overlap", (_TE,), _LEAVE_OUT,
            "Transformer Engine's overlap of matrix products and tensor-parallel communication needs GPUs"),
    Rule("cp_comm_type", "--cp-comm-type", (_TE,), lambda value: bool(value) and set(value) != {"all_gather"},
        ["all_gather"], "--cp-comm-type all_gather", "keys and values are gathered: same mathematics",
        applies=lambda args: (getattr(args, "context_parallel_size", 1) or 1) > 1),
    Rule("hierarchical_context_parallel_sizes", "--hierarchical-context-parallel-sizes", (_TE,), _on, None, _LEAVE_OUT,
        "keys and values are gathered in one group: same mathematics"),
    Rule("cuda_graph_impl", "--cuda-graph-impl", ("cuda",), _is("local", "transformer_engine"), "none",
        "--cuda-graph-impl none", "CUDA graphs need a GPU"),
    Rule("cuda_graph_scope", "--cuda-graph-scope", ("cuda",), _on, [], _LEAVE_OUT, "CUDA graphs need a GPU"),
    _switch("enable_cuda_graph", "--enable-cuda-graph", ("cuda",), _LEAVE_OUT, "CUDA graphs need a GPU"),
    _switch("external_cuda_graph", "--external-cuda-graph", ("cuda",), _LEAVE_OUT, "CUDA graphs need a GPU"),
    _switch("optimizer_cuda_graph", "--optimizer-cuda-graph", ("cuda",), _LEAVE_OUT, "CUDA graphs need a GPU"),
    _switch("optimizer_cpu_offload", "--optimizer-cpu-offload", (_DEVICE,), _LEAVE_OUT,
            "optimizer state is in host memory already"),
    _switch("overlap_cpu_optimizer_d2h_h2d", "--overlap-cpu-optimizer-d2h-h2d", (_DEVICE,), _LEAVE_OUT,
            "nothing is copied between device and host"),
    Rule("cpu_offloading_num_layers", "--cpu-offloading-num-layers", (_DEVICE,), _on, 0, _LEAVE_OUT,
        "activations are in host memory already"),
    _switch("fine_grained_activation_offloading", "--fine-grained-activation-offloading", (_DEVICE,), _LEAVE_OUT,
            "activations are in host memory already"),
    _switch("nccl_ub", "--use-nccl-ub", ("cuda",), _LEAVE_OUT, "NCCL user buffers need GPUs"),
    _switch("use_sharp", "--use-sharp", ("cuda",), _LEAVE_OUT, "SHARP reductions are NCCL's"),
    Rule("sharp_enabled_group", "--sharp-enabled-group", ("cuda",), _on, None, _LEAVE_OUT,
        "SHARP reductions are NCCL's"),
    Rule("high_priority_stream_groups", "--high-priority-stream-groups", ("cuda",), _on, [], _LEAVE_OUT,
        "streams with a priority are a GPU's"),
    Rule("nccl_communicator_config_path", "--nccl-communicator-config-path", ("cuda",), _on, None, _LEAVE_OUT,
        "there is no NCCL communicator to configure"),
    _switch("use_ring_exchange_p2p", "--use-ring-exchange-p2p", ("cuda",), _LEAVE_OUT,
            "needs a special build of torch.distributed"),
    _switch("record_memory_history", "--record-memory-history", ("cuda",), _LEAVE_OUT,
            "records the CUDA allocator's history"),
    _switch("log_energy", "--log-energy", ("cuda",), _LEAVE_OUT, "read from NVIDIA's management library"),
    Rule("async_strategy", "--async-strategy", (_NVRX,), _is("nvrx"), "mcore", "--async-strategy mcore",
        "nvidia-resiliency-ext is not installed: megatron.core writes asynchronous checkpoints itself"),
)
# fmt: on

_STEP = "megatron's own step"
"""A need that is never met, so its rows always apply when their table is used."""

_BUFFERS = "tunes Megatron's gradient buffers; the engine has its own"
_OVERLAP = "overlaps Megatron's own collectives; the engine has its own schedule"
_IN_FP32 = "gradients are summed in fp32 in any case"
_LAUNCHED = "its memory is shared by the groups of the launch, which change when a rank is lost; same mathematics"


def _unused(attribute: str, flag: str, reason: str) -> Rule:
    return _switch(attribute, flag, (_STEP,), _LEAVE_OUT, reason)


# A table: one row a line, which the formatter would break up.
# fmt: off
ELASTIC_ROWS: tuple[Rule, ...] = (
    _unused("overlap_param_gather_with_optimizer_step", "--overlap-param-gather-with-optimizer-step", _OVERLAP),
    _unused("delay_wgrad_compute", "--delay-wgrad-compute", _OVERLAP),
    _unused("defer_embedding_wgrad_compute", "--defer-embedding-wgrad-compute", _OVERLAP),
    _unused("overlap_p2p_comm_warmup_flush", "--overlap-p2p-communication-warmup-flush", _OVERLAP),
    _unused("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm", _OVERLAP),
    _unused("moe_shared_expert_overlap", "--moe-shared-expert-overlap", _OVERLAP),
    _unused("ep_overlap_early_attn_memory_release", "--ep-overlap-early-attn-memory-release", _OVERLAP),
    Rule("wgrad_deferral_limit", "--wgrad-deferral-limit", (_STEP,), _on, 0, _LEAVE_OUT, _OVERLAP),
    Rule("align_grad_reduce", "--no-align-grad-reduce", (_STEP,), _off, True, _LEAVE_OUT, _OVERLAP),
    Rule("align_param_gather", "--no-align-param-gather", (_STEP,), _off, True, _LEAVE_OUT, _OVERLAP),
    _unused("tp_comm_overlap", "--tp-comm-overlap", _LAUNCHED),
    Rule("symmetric_ar_type", "--symmetric-ar-type", (_STEP,), _on, None, _LEAVE_OUT, _LAUNCHED),
    Rule("moe_token_dispatcher_type", "--moe-token-dispatcher-type flex", (_STEP,), _is("flex"), "alltoall",
        "--moe-token-dispatcher-type alltoall", _LAUNCHED),
    _unused("moe_enable_deepep", "--moe-enable-deepep", _LAUNCHED),
    Rule("high_priority_stream_groups", "--high-priority-stream-groups", (_STEP,), _on, [], _LEAVE_OUT,
        "sets streams of Megatron's own groups; the engine has its own"),
    _unused("mtp_standalone", "--mtp-standalone",
            "makes Megatron's own stages exchange shapes; the engine's know them"),
    Rule("microbatch_group_size_per_vp_stage", "--microbatch-group-size-per-virtual-pipeline-stage", (_STEP,),
        lambda value: value is not None, None, _LEAVE_OUT,
        "orders Megatron's interleaved schedule; the engine's has Megatron's default, groups of the pipeline's size"),
    _switch("gradient_accumulation_fusion", "--no-gradient-accumulation-fusion", (_STEP,),
            "--no-gradient-accumulation-fusion", "adds into Megatron's gradient buffers; the engine has its own"),
    _unused("ddp_average_in_collective", "--ddp-average-in-collective", _BUFFERS),
    _unused("ddp_pad_buckets_for_high_nccl_busbw", "--ddp-pad-buckets-for-high-nccl-busbw", _BUFFERS),
    Rule("ddp_num_buckets", "--ddp-num-buckets", (_STEP,), _on, None, _LEAVE_OUT, _BUFFERS),
    _unused("ddp_reduce_scatter_with_fp32_accumulation", "--ddp-reduce-scatter-with-fp32-accumulation", _IN_FP32),
    Rule("ddp_param_name_patterns_for_fp32_local_accumulation",
        "--ddp-param-name-patterns-for-fp32-local-accumulation", (_STEP,), _on, [], _LEAVE_OUT, _IN_FP32),
    _unused("nccl_ub", "--use-nccl-ub", _BUFFERS),
    _unused("grad_reduce_in_bf16", "--grad-reduce-in-bf16",
            "gradients are summed in fp32, as without this flag: exact sums, twice the bytes"),
    _unused("fp8_param_gather", "--fp8-param-gather",
            "parameters are gathered in the type of the model, and layers quantize them: twice the bytes"),
    _unused("reuse_grad_buf_for_mxfp8_param_ag", "--reuse-grad-buf-for-mxfp8-param-ag", _BUFFERS),
    Rule("main_grads_dtype", "--main-grads-dtype", (_STEP,), _is("bf16"), "fp32", _LEAVE_OUT,
        "gradients are summed in fp32: exact sums, twice the bytes"),
    _unused("create_all_gather_group", "--create-all-gather-group", _BUFFERS),
    Rule("num_distributed_optimizer_instances", "--num-distributed-optimizer-instances", (_STEP,),
        lambda value: value is not None and value > 1, 1, _LEAVE_OUT,
        "copies of optimizer state are kept instead (--elastic-mirrors)"),
    _unused("optimizer_cpu_offload", "--optimizer-cpu-offload",
            "the elastic engine decides where optimizer steps are computed"),
    _unused("overlap_cpu_optimizer_d2h_h2d", "--overlap-cpu-optimizer-d2h-h2d",
            "the elastic engine decides where optimizer steps are computed"),
    Rule("check_weight_hash_across_dp_replicas_interval", "--check-weight-hash-across-dp-replicas-interval", (_STEP,),
        _on, None, _LEAVE_OUT, "owners and copies are compared instead (--elastic-verify-interval)"),
    Rule("dump_param_to_param_group_map", "--dump-param-to-param-group-map", (_STEP,), _on, None, _LEAVE_OUT,
        "Megatron's optimizer writes this file; the engine has its own"),
    _unused("test_mode", "--test-mode",
            "compares norms of replicas; owners and copies are compared instead (--elastic-verify-interval)"),
    Rule("dist_ckpt_optim_fully_reshardable", "--dist-ckpt-optim-fully-reshardable", (_STEP,), _off, True,
        "--dist-ckpt-optim-fully-reshardable", "the default form only fits one data-parallel size",
        "use_distributed_optimizer"),
    Rule("ckpt_format", "--ckpt-format", (_STEP,), _is("torch"), "torch_dist", "--ckpt-format torch_dist",
        "shards that any other sizes can load; plain Megatron resumes them with --ckpt-format torch_dist"),
    _unused("async_save", "--async-save", "checkpoints are written while training goes on in any case"),
    _unused("use_persistent_ckpt_worker", "--use-persistent-ckpt-worker",
            "a thread of the rank writes its share of a checkpoint"),
    _unused("exit_signal_handler", "--exit-signal-handler",
            "the signal of --exit-signal to the launcher or to any worker drains the job at the next step boundary; "
            "SIGTERM does so in any case"),
    Rule("rerun_mode", "--rerun-mode", (_STEP,), _is("validate_results", "report_stats"), "disabled",
        "--rerun-mode disabled", "repeats Megatron's own step, which --elastic replaces"),
    Rule("error_injection_rate", "--error-injection-rate", (_STEP,), _on, 0, _LEAVE_OUT,
        "disturbs Megatron's own step, which --elastic replaces; --elastic-inject disturbs the engine's"),
    Rule("empty_unused_memory_level", "--empty-unused-memory-level", (_STEP,), _on, 0, _LEAVE_OUT,
        "empties the allocator's cache within Megatron's own step, which --elastic replaces"),
    _unused("check_for_spiky_loss", "--check-for-spiky-loss",
            "repeats Megatron's own step, which --elastic replaces"),
    Rule("distributed_timeout_seconds_after_init", "--distributed-timeout-seconds-after-init", (_STEP,),
        lambda value: value is not None, None, _LEAVE_OUT,
        "sets it for torch's groups; the engine ends waits itself (--elastic-detection-timeout)"),
    _unused("exit_signal_handler_for_training", "--exit-signal-handler-for-training",
            "waits for all ranks when one gets a signal; SIGTERM drains the job in any case"),
    _unused("check_for_large_grads", "--check-for-large-grads",
            "looks at Megatron's gradient buffers; the engine checks its own for numbers that are not finite"),
    Rule("flight_recorder_dump_path", "--flight-recorder-dump-path", (_STEP,), _on, None, _LEAVE_OUT,
        "records NCCL's groups, which the engine does not use; --elastic-event-log has what its ranks did"),
    _unused("log_straggler", "--log-straggler",
            "times Megatron's own step, which --elastic replaces; ranks are measured in any case"),
    _unused("log_energy", "--log-energy",
            "sums over all ranks, which a loss would stop; the event log has each rank's power"),
)
# fmt: on
"""Flags that ``--elastic`` accepts with one line each: hardware tuning, or replaced by the engine's own."""


@dataclass(frozen=True)
class Substituted:
    """One line of the table printed at start."""

    row: Rule
    asked: Any


def substitute(args: Namespace, machine: Installed, rows: Iterable[Rule] = ROWS) -> tuple[Substituted, ...]:
    """Replace unsupported values in ``args``; return the changes in table order."""
    changed = []
    for row in rows:
        missing = any(not machine.has(need) for need in row.needs) and row.applies(args)
        if not missing or not hasattr(args, row.attribute):
            continue
        if row.beside and not getattr(args, row.beside, None):
            continue
        asked = getattr(args, row.attribute)
        if row.asked(asked):
            setattr(args, row.attribute, _like(asked, row.used))
            changed.append(Substituted(row, asked))
    return tuple(changed)


def _like(asked: Any, used: Any) -> Any:
    """Return ``used`` as a member of the enumeration of ``asked``, if that is one, or ``asked`` without a word."""
    if isinstance(used, Without):
        return [word for word in asked if word != used.word]
    members = getattr(type(asked), "__members__", None)
    return members[used] if members is not None and isinstance(used, str) else used


def refuse(changed: Iterable[Substituted]) -> None:
    """Raise :class:`BadInput` that names the flags which make every substitution unnecessary."""
    lines = list(changed)
    if not lines:
        return
    give = " ".join(line.row.spelled for line in lines if line.row.spelled != _LEAVE_OUT)
    drop = " ".join(line.row.flag for line in lines if line.row.spelled == _LEAVE_OUT)
    fix = "; ".join(text for text in (give and f"give {give}", drop and f"leave out {drop}") if text)
    raise BadInput(f"--elastic-strict-flags: {len(lines)} flags would be substituted on this machine; {fix}")


def _shown(value: Any) -> str:
    return str(getattr(value, "name", value)) if value not in (None, [], ()) else "-"


def table(changed: Iterable[Substituted], title: str) -> str:
    """Return the lines as text under ``title``; empty if there are no changes."""
    lines = [(line.row.flag, _shown(line.asked), _shown(line.row.used), line.row.reason) for line in changed]
    if not lines:
        return ""
    head = ("flag", "asked", "used", "why")
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(3)]
    rendered = [title + ":"]
    for line in [head, *lines]:
        cells = "  ".join(cell.ljust(width) for cell, width in zip(line[:3], widths, strict=True))
        rendered.append(f"  {cells}  {textwrap.shorten(line[3], 100)}")
    return "\n".join(rendered)
