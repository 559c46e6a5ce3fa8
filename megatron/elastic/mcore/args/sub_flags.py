"""Flags of Megatron that only tune a feature which another flag turns on: data for the support matrix.

Each is treated as that flag is: without it, it has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["TUNED", "spellings"]

# A table: one row a line, which the formatter would break up.
# fmt: off
TUNED: Mapping[str, tuple[str, ...]] = {
    "--hybrid-context-parallel": ("--max-seqlen-per-dp-cp-rank",),
    "--experimental-attention-variant": ("--dsa-indexer-use-sparse-loss",),
    "--hybrid-layer-pattern": (
        "--mamba-state-dim", "--mamba-head-dim", "--mamba-num-groups", "--mamba-num-heads",
        "--disable-mamba-mem-eff-path",
    ),
    "--moe-use-upcycling": ("--moe-upcycling-granularity",),
    "--moe-enable-deepep": (
        "--moe-flex-dispatcher-backend", "--moe-permute-fusion-into-hybridep", "--moe-deepep-num-sms",
        "--moe-hybridep-num-sms", "--moe-hybridep-num-blocks-permute", "--moe-hybridep-num-blocks-unpermute",
    ),
    "--fp8-format": ("--fp8-interval", "--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8"),
    "--fp4-format": ("--fp4-recipe", "--fp4-quantizer-factory"),
    "--kitchen-config-file": ("--use-kitchen-attention", "--kitchen-attention-backend"),
    "--cuda-graph-impl": ("--cuda-graph-warmup-steps", "--moe-pad-experts-for-cuda-graph-inference"),
    "--tp-comm-overlap": (
        "--no-tp-comm-bulk-wgrad", "--no-tp-comm-bulk-dgrad", "--no-tp-comm-overlap-ag", "--no-tp-comm-overlap-rs",
        "--tp-comm-overlap-rs-dgrad", "--no-tp-comm-split-ag", "--no-tp-comm-split-rs",
        "--tp-comm-bootstrap-backend", "--tp-comm-overlap-cfg",
    ),
    "--cpu-offloading-num-layers": ("--cpu-offloading-retain-pinned-cpu-buffers",),
    "--fine-grained-activation-offloading": ("--offload-modules", "--min-offloaded-tensor-size"),
    "--optimizer-cpu-offload": (
        "--optimizer-offload-fraction", "--use-torch-optimizer-for-cpu-offload", "--no-pin-cpu-grads",
        "--no-pin-cpu-params",
    ),
    "--use-nccl-ub": ("--disable-symmetric-registration",),
    "--use-megatron-fsdp": (
        "--no-strict-fsdp-dtensor-load", "--fsdp-manual-registration", "--outer-dp-sharding-strategy",
        "--no-gradient-reduce-div-fusion", "--fsdp-double-buffer", "--suggested-communication-unit-size",
        "--keep-fp8-transpose-cache", "--enable-full-sharding-in-hsdp", "--megatron-fsdp-main-params-dtype",
        "--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-grad-comm-dtype",
    ),
    "--use-torch-fsdp2": ("--torch-fsdp2-no-reshard-after-forward",),
    "--non-persistent-ckpt-type": (
        "--non-persistent-local-ckpt-dir", "--non-persistent-local-ckpt-algo", "--replication", "--replication-jump",
        "--replication-factor",
    ),
    "--fim-data": (
        "--fim-split-sample", "--fim-fragment-rate", "--fim-no-prefix", "--fim-prefix-token", "--fim-middle-token",
        "--fim-suffix-token", "--fim-pad-token", "--fim-eod-token",
    ),
    "--sft": ("--sft-tokenizer-prompt-format",),
    "--adlr-autoresume": ("--adlr-autoresume-interval",),
    "--enable-ft-package": ("--calc-ft-timeouts", "--ft-num-warmup-iters"),
    "--inprocess-restart": (
        "--inprocess-max-iterations", "--inprocess-monitor-thread-interval", "--inprocess-monitor-process-interval",
        "--inprocess-progress-watchdog-interval", "--inprocess-heartbeat-interval", "--inprocess-soft-timeout",
        "--inprocess-hard-timeout", "--inprocess-heartbeat-timeout", "--inprocess-barrier-timeout",
        "--inprocess-completion-timeout", "--inprocess-last-call-wait", "--inprocess-termination-grace-time",
        "--inprocess-granularity", "--inprocess-active-world-size", "--inprocess-empty-cuda-cache",
    ),
    "--log-straggler": ("--straggler-ctrlr-port", "--straggler-minmax-count", "--disable-straggler-on-startup"),
    "--error-injection-rate": ("--error-injection-type",),
    "--flight-recorder-dump-path": (
        "--flight-recorder-trace-buffer-size", "--no-flight-recorder-dump-on-timeout",
        "--flight-recorder-include-stack-trace", "--no-flight-recorder-include-only-active",
        "--no-flight-recorder-extra-dump-on-exec",
    ),
}
"""The flag of a feature → the flags that tune it."""
# fmt: on


def spellings(flag: str) -> tuple[str, ...]:
    """Return the names under which a table may list ``flag``: of a switch's several names it has one."""
    if flag.startswith("--disable-"):
        return flag, "--no-" + flag.removeprefix("--disable-")
    return (flag, "--" + flag.removeprefix("--no-")) if flag.startswith("--no-") else (flag,)
