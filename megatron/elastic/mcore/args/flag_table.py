"""Megatron flags by subject: data for the support matrix.

``HONOURED``: flags with the same meaning with and without ``--elastic``, because the
model, the data sets, the loop or the engine's settings take them from the same
arguments. Flags of a feature with a row of its own are in that row.
"""

from __future__ import annotations

__all__ = ["FP8", "HONOURED", "LINEAR_ATTENTION", "MLA", "MOE", "MOST_USED", "MUP"]

# A table: one row a line, which the formatter would break up.
# fmt: off
MOE = (
    "--moe-router-topk", "--moe-ffn-hidden-size", "--moe-router-dtype", "--moe-shared-expert-intermediate-size",
    "--moe-shared-expert-gate", "--moe-token-dispatcher-type", "--moe-aux-loss-coeff", "--moe-z-loss-coeff",
    "--moe-router-pre-softmax", "--moe-router-score-function", "--moe-router-topk-scaling-factor",
    "--moe-router-num-groups", "--moe-router-group-topk", "--moe-expert-capacity-factor", "--moe-token-drop-policy",
    "--moe-pad-expert-input-to-capacity", "--moe-router-bias-update-rate", "--moe-layer-recompute",
    "--moe-apply-probs-on-input", "--use-fused-weighted-squared-relu", "--moe-enable-routing-replay",
)
# fmt: on

FP8 = (
    *("--fp8-recipe", "--fp8-margin", "--fp8-amax-history-len", "--fp8-amax-compute-algo"),
    *("--no-fp8-wgrad", "--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16"),
    *("--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"),
)

MLA = ("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim")

MUP = (
    *("--mup-width-mult", "--mup-base-hidden-size", "--mup-embedding-mult", "--mup-output-mult"),
    *("--mup-base-head-dim", "--mup-attn-scale-power"),
)

LINEAR_ATTENTION = (
    "--linear-key-head-dim",
    "--linear-num-key-heads",
    "--linear-num-value-heads",
    "--linear-value-head-dim",
    "--linear-attention-freq",
    "--linear-conv-kernel-dim",
    "--dsa-indexer-head-dim",
    "--dsa-indexer-loss-coeff",
    "--dsa-indexer-n-heads",
    "--dsa-indexer-topk",
)

# A table: one row a line, which the formatter would break up.
# fmt: off
_MODEL = (
    "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--kv-channels",
    "--group-query-attention", "--num-query-groups", "--max-position-embeddings", "--seq-length",
    "--position-embedding-type", "--rotary-percent", "--rotary-base", "--rotary-interleaved",
    "--rotary-seq-len-interpolation-factor", "--use-rope-scaling", "--rope-scaling-factor", "--rope-type",
    "--use-rotary-position-embeddings", "--no-position-embedding", "--make-vocab-size-divisible-by",
    "--untie-embeddings-and-output-weights", "--disable-bias-linear", "--add-qkv-bias", "--normalization",
    "--norm-epsilon", "--apply-layernorm-1p", "--qk-layernorm", "--swiglu", "--squared-relu", "--quick-geglu",
    "--attention-softmax-in-fp32", "--apply-query-key-layer-scaling", "--init-method-std",
    "--is-hybrid-model", "--no-initialization", "--init-model-with-meta-device",
    "--window-size", "--softmax-type", "--spec", "--use-mcore-models",
    "--cross-entropy-loss-fusion", "--hidden-dropout", "--attention-dropout", "--fp32-residual-connection",
    "--accumulate-allreduce-grads-in-fp32", "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers", "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split", "--pipeline-model-parallel-layout", "--vocab-size",
    "--attention-output-gate", "--glu-linear-offset", "--activation-func-clamp-value", "--qk-l2-norm",
    "--embedding-init-method-std", "--disable-bf16-reduced-precision-matmul", "--recompute-modules",
    "--mtp-use-repeated-layer", "--no-clone-scatter-output-in-embedding",
    "--disable-clone-scatter-output-in-embedding", "--window-attn-skip-freq", "--no-rope-freq",
    "--rotary-scaling-factor", "--mscale", "--mscale-all-dim", "--fp16-lm-cross-entropy", "--encoder-num-layers",
    "--encoder-seq-length", "--decoder-seq-length", "--disable-jit-fuser", "--padded-vocab-size",
)
# fmt: on

# A table: one row a line, which the formatter would break up.
# fmt: off
_OPTIMISATION = (
    "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size",
    "--micro-batch-size", "--global-batch-size", "--train-iters", "--train-samples", "--lr", "--min-lr",
    "--lr-decay-style", "--lr-decay-iters", "--lr-decay-samples", "--lr-warmup-iters", "--lr-warmup-samples",
    "--lr-warmup-fraction", "--lr-warmup-init", "--lr-wsd-decay-style", "--lr-wsd-decay-iters",
    "--lr-wsd-decay-samples", "--weight-decay", "--start-weight-decay", "--end-weight-decay",
    "--weight-decay-incr-style", "--clip-grad", "--adam-beta1", "--adam-beta2", "--adam-eps", "--sgd-momentum",
    "--muon-momentum", "--muon-no-split-qkv", "--muon-use-nesterov", "--muon-scale-mode", "--muon-fp32-matmul-prec",
    "--muon-coefficient-type", "--muon-num-ns-steps", "--muon-extra-scale-factor",
    "--decoupled-lr", "--decoupled-min-lr", "--apply-wd-to-qk-layernorm", "--calculate-per-token-loss",
    "--loss-scale", "--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis", "--seed",
    "--deterministic-mode", "--no-check-for-nan-in-loss-and-grad", "--override-opt-param-scheduler",
    "--use-checkpoint-opt-param-scheduler", "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler",
    "--no-weight-decay-cond-type", "--decrease-batch-size-if-needed", "--no-overlap-p2p-communication",
)
# fmt: on

# A table: one row a line, which the formatter would break up.
# fmt: off
_DATA = (
    "--data-path", "--train-data-path", "--valid-data-path", "--test-data-path", "--data-args-path",
    "--per-split-data-args-path", "--data-cache-path", "--split", "--mock-data", "--num-workers",
    "--num-dataset-builder-threads", "--no-mmap-bin-files", "--no-data-sharding",
    "--no-create-attention-mask-in-dataloader", "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss",
    "--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--eval-iters", "--eval-interval",
    "--tiktoken-pattern", "--tiktoken-num-special-tokens", "--fim-rate", "--fim-spm-rate",
    "--dataloader-fast-cache-load", "--dataloader-defer-npy-index-mmap", "--per-dataset-sequences-path",
    "--mid-level-dataset-surplus", "--allow-ambiguous-pad-tokens", "--object-storage-cache-path",
    "--tokenizer-metadata", "--tokenizer-special-tokens", "--tiktoken-special-tokens",
    "--tokenizer-hf-use-fast", "--tokenizer-hf-include-special-tokens",
    "--tokenizer-hf-no-use-fast", "--tokenizer-hf-no-include-special-tokens", "--trust-remote-code",
)
# fmt: on

# A table: one row a line, which the formatter would break up.
# fmt: off
_CHECKPOINTS = (
    "--save", "--load", "--save-interval", "--save-retain-interval", "--no-save-optim", "--no-save-rng",
    "--no-load-optim", "--no-load-rng", "--finetune", "--pretrained-checkpoint", "--exit-on-missing-checkpoint",
    "--use-checkpoint-args", "--dist-ckpt-strictness", "--dist-ckpt-optim-fully-reshardable",
    "--ckpt-fully-parallel-save", "--no-ckpt-fully-parallel-save", "--ckpt-fully-parallel-load",
    "--ckpt-assume-constant-structure", "--auto-detect-ckpt-format", "--verify-integrity",
    "--persistent-save-interval", "--non-persistent-save-interval", "--non-persistent-global-ckpt-dir", "--ckpt-step",
    "--dist-ckpt-workers", "--dist-ckpt-save-pre-mcore-014", "--distrib-optim-fully-reshardable-mem-efficient",
    "--use-dist-ckpt", "--dist-ckpt-format", "--ckpt-fully-parallel-save-process-group",
    "--ckpt-fully-parallel-load-exchange-algo", "--async-ckpt-cpu-priority", "--async-ckpt-io-priority",
    "--ckpt-fully-parallel-load-process-group", "--load-main-params-from-ckpt", "--use-mp-args-from-checkpoint-args",
    "--no-use-tokenizer-model-from-checkpoint-args",
)
# fmt: on

# A table: one row a line, which the formatter would break up.
# fmt: off
_LOOP = (
    "--log-interval", "--log-throughput", "--log-progress", "--log-params-norm", "--log-num-zeros-in-grad",
    "--log-memory-to-tensorboard", "--log-timers-to-tensorboard", "--log-validation-ppl-to-tensorboard",
    "--log-batch-size-to-tensorboard", "--log-learning-rate-to-tensorboard", "--log-world-size-to-tensorboard",
    "--tensorboard-dir", "--tensorboard-log-interval", "--tensorboard-queue-size", "--timing-log-level",
    "--timing-log-option", "--wandb-project", "--wandb-exp-name", "--wandb-entity", "--wandb-save-dir",
    "--exit-interval", "--exit-duration-in-mins", "--exit-signal-handler", "--exit-signal", "--manual-gc",
    "--manual-gc-interval", "--no-manual-gc-eval", "--distributed-timeout-minutes",
    "--local-rank",
    "--disable-gloo-process-groups", "--no-one-logger", "--profile", "--profile-step-start", "--profile-step-end",
    "--profile-ranks", "--use-pytorch-profiler", "--skip-train", "--train-sync-interval", "--disable-manual-gc-eval",
    "--log-memory-interval", "--log-device-memory-used", "--no-log-loss-scale-to-tensorboard",
    "--disable-log-loss-scale-to-tensorboard", "--no-barrier-with-level-1-timing", "--logging-level",
    "--run-workload-inspector-server", "--memory-snapshot-path", "--app-tag-run-name", "--app-tag-run-version",
    "--enable-experimental", "--disable-msc", "--one-logger-project", "--one-logger-run-name", "--one-logger-async",
    "--pytorch-profiler-collect-shapes", "--pytorch-profiler-collect-callstack", "--pytorch-profiler-collect-chakra",
)
# fmt: on

HONOURED = frozenset((*_MODEL, *_OPTIMISATION, *_DATA, *_CHECKPOINTS, *_LOOP))

# A table: one row a line, which the formatter would break up.
# fmt: off
MOST_USED = (
    "--micro-batch-size", "--tensor-model-parallel-size", "--seq-length", "--split", "--eval-interval",
    "--eval-iters", "--hidden-size", "--log-interval", "--max-position-embeddings", "--num-attention-heads",
    "--num-layers", "--clip-grad", "--save", "--save-interval", "--tensorboard-dir", "--data-path", "--load",
    "--global-batch-size", "--pipeline-model-parallel-size", "--data-cache-path", "--transformer-impl",
    "--log-memory-to-tensorboard", "--log-num-zeros-in-grad", "--log-params-norm", "--log-timers-to-tensorboard",
    "--log-validation-ppl-to-tensorboard", "--lr", "--train-iters", "--ckpt-format", "--lr-decay-style", "--min-lr",
    "--distributed-backend", "--weight-decay", "--timing-log-level", "--use-mcore-models", "--merge-file",
    "--vocab-file", "--bf16", "--no-gradient-accumulation-fusion", "--lr-warmup-fraction", "--lr-decay-iters",
    "--async-save", "--use-persistent-ckpt-worker", "--attention-softmax-in-fp32", "--dist-ckpt-strictness",
    "--deterministic-mode", "--attention-backend", "--use-distributed-optimizer", "--sequence-parallel",
    "--dist-ckpt-optim-fully-reshardable", "--attention-dropout", "--hidden-dropout", "--overlap-grad-reduce",
    "--untie-embeddings-and-output-weights", "--overlap-param-gather", "--disable-bias-linear",
    "--position-embedding-type", "--context-parallel-size", "--num-layers-per-virtual-pipeline-stage",
    "--num-query-groups", "--group-query-attention", "--swiglu", "--rotary-percent", "--normalization",
    "--adam-beta1", "--adam-beta2", "--apply-query-key-layer-scaling", "--calculate-per-token-loss", "--manual-gc",
    "--no-rope-fusion", "--lr-warmup-samples", "--fp16", "--no-create-attention-mask-in-dataloader",
    "--no-mmap-bin-files", "--ffn-hidden-size", "--tokenizer-type", "--apply-layernorm-1p",
    "--ckpt-fully-parallel-load", "--kv-channels", "--log-throughput", "--expert-tensor-parallel-size", "--adam-eps",
    "--decoupled-lr", "--rerun-mode", "--use-tp-pp-dp-mapping", "--init-method-std",
    "--moe-router-load-balancing-type", "--moe-router-topk", "--num-experts", "--tokenizer-model",
    "--cross-entropy-loss-fusion", "--exit-interval", "--moe-ffn-hidden-size", "--moe-router-dtype",
    "--num-workers", "--experimental-attention-variant", "--lr-decay-samples", "--train-samples",
    "--no-masked-softmax-fusion", "--vocab-size", "--distributed-timeout-minutes",
    "--moe-shared-expert-intermediate-size", "--linear-key-head-dim", "--linear-num-key-heads",
    "--linear-num-value-heads", "--linear-value-head-dim", "--apply-wd-to-qk-layernorm", "--attention-output-gate",
    "--decoupled-min-lr", "--linear-attention-freq", "--linear-conv-kernel-dim", "--moe-shared-expert-gate",
    "--step-batch-size-schedule", "--wandb-exp-name", "--wandb-project", "--squared-relu",
    "--check-weight-hash-across-dp-replicas-interval", "--fp8-format", "--fp8-param-gather", "--mock-data",
    "--no-ckpt-fully-parallel-save", "--save-retain-interval", "--verify-integrity", "--wandb-entity",
    "--wandb-save-dir", "--rotary-base", "--qk-layernorm", "--recompute-granularity", "--recompute-method",
    "--recompute-num-layers", "--no-load-optim", "--no-load-rng", "--use-flash-attn", "--lr-warmup-iters",
    "--seed", "--no-bias-dropout-fusion", "--no-bias-gelu-fusion", "--make-vocab-size-divisible-by",
    "--initial-loss-scale", "--accumulate-allreduce-grads-in-fp32",
)
# fmt: on
"""Flags by frequency in Megatron-LM's GPT training configurations and example scripts."""
