"""Flags of Megatron that nothing reads which pretrains a GPT, by subject: data for the support matrix.

A flag is here if its setting is read by no code of ``megatron.core`` and ``megatron.training`` that a training or an
evaluation of a GPT runs, in any release of :data:`~megatron.elastic.mcore.patching.releases.TESTED`. Flags that tune
another feature, which may be off, are in ``sub_flags``.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["RL", "UNREAD"]

RL = "reinforcement learning"
"""The subject of the flags that are read beside --perform-rl-step."""

# A table: one row a line, which the formatter would break up.
# fmt: off
_RL = (
    "--rl-prompts-per-eval", "--grpo-prompts-per-step", "--grpo-group-size", "--rl-num-parallel-generations",
    "--rl-num-parallel-generation-batches", "--rl-generation-batch-size", "--grpo-iterations",
    "--grpo-clamp-eps-lower", "--grpo-clamp-eps-upper", "--grpo-kl-beta", "--grpo-entropy-term-weight",
    "--grpo-filter-groups-with-same-reward", "--langrl-env-config", "--rl-default-temperature", "--rl-default-top-p",
    "--rl-default-top-k", "--rl-offload-optimizer-during-inference", "--rl-kv-cache-management-mode",
    "--rl-persist-cuda-graphs", "--rl-partial-rollouts", "--rl-inference-logprobs-is-correction",
    "--rl-importance-sampling-truncation-coef", "--rl-sequence-packing-max-sequences-per-bin",
    "--rl-sequence-packing-algo", "--rl-training-cuda-graphs", "--rl-inference-tensor-model-parallel-size",
    "--rl-inference-pipeline-model-parallel-size", "--rl-inference-expert-model-parallel-size",
    "--rl-inference-expert-tensor-model-parallel-size", "--rl-inference-model-unified-memory-level",
    "--rl-offload-inference-model-weights-when-idle", "--refit-method", "--rl-verify-model-weights-swap",
    "--rl-parallel-generation-tasks", "--rl-skip-bos-token", "--rl-inference-parsers",
)

_INFERENCE = (
    "--inference-batch-times-seqlen-threshold", "--max-tokens-to-oom", "--use-legacy-static-engine",
    "--inference-max-requests", "--inference-max-seq-length", "--inference-dynamic-batching",
    "--inference-dynamic-batching-buffer-size-gb", "--inference-dynamic-batching-paused-buffer-size-gb",
    "--inference-dynamic-batching-mamba-memory-ratio", "--inference-dynamic-batching-block-size",
    "--inference-dynamic-batching-max-requests", "--inference-dynamic-batching-max-tokens",
    "--inference-dynamic-batching-num-cuda-graphs", "--inference-dynamic-batching-track-paused-request-events",
    "--inference-dynamic-batching-track-generated-token-events", "--decode-only-cuda-graphs",
    "--inference-dynamic-batching-unified-memory-level", "--enable-chunked-prefill", "--num-speculative-tokens",
    "--inference-dynamic-batching-prefix-caching", "--inference-dynamic-batching-prefix-caching-eviction-policy",
    "--inference-dynamic-batching-prefix-caching-coordinator-policy",
    "--inference-dynamic-batching-prefix-caching-routing-alpha",
    "--inference-dynamic-batching-prefix-caching-mamba-gb", "--inference-dynamic-batching-cuda-graph-max-tokens",
    "--inference-dynamic-batching-cuda-graph-mixed-prefill-count", "--inference-logging-step-interval",
    "--inference-text-gen-server-logging", "--inference-wandb-logging", "--inference-coordinator-port",
    "--mamba-inference-conv-states-dtype", "--mamba-inference-ssm-states-dtype",
    "--inference-use-synchronous-zmq-collectives", "--inference-grouped-gemm-backend",
    "--inference-moe-disable-fused-quant-kernels", "--nccl-all-reduce-for-prefill", "--mlp-chunks-for-prefill",
    "--flash-decode",
)

_OTHER_MODELS = (
    "--bert-no-binary-head", "--output-bert-embeddings", "--bert-embedder-type", "--mask-prob", "--short-seq-prob",
    "--vocab-extra-ids", "--decoder-num-layers", "--relative-attention-num-buckets",
    "--relative-attention-max-distance",
)

_RETRIEVAL = (
    "--ict-head-size", "--biencoder-projection-dim", "--biencoder-shared-query-context-model", "--ict-load",
    "--bert-load", "--titles-data-path", "--query-in-block-prob", "--use-one-sent-docs", "--evidence-data-path",
    "--retriever-report-topk-accuracies", "--retriever-score-scaling", "--block-data-path", "--embedding-path",
    "--indexer-batch-size", "--indexer-log-interval", "--sample-rate",
)

_VISION = (
    "--num-classes", "--img-h", "--img-w", "--num-channels", "--patch-dim", "--classes-fraction",
    "--data-per-class-fraction", "--head-lr-mult", "--vision-backbone-type", "--swin-backbone-type", "--mask-type",
    "--mask-factor", "--iter-per-epoch", "--dino-local-img-size", "--dino-local-crops-number",
    "--dino-head-hidden-size", "--dino-bottleneck-size", "--dino-freeze-last-layer", "--dino-norm-last-layer",
    "--dino-warmup-teacher-temp", "--dino-teacher-temp", "--dino-warmup-teacher-temp-epochs",
)

_LEFT_OVER = (
    "--apply-residual-connection-post-layernorm", "--openai-gelu", "--onnx-safe",
    "--exit-signal-handler-for-dataloader", "--no-scatter-gather-tensors-in-pipeline",
)

UNREAD: Mapping[str, tuple[str, ...]] = {
    RL: _RL,
    "inference": _INFERENCE,
    "BERT and T5": _OTHER_MODELS,
    "retrieval": _RETRIEVAL,
    "vision": _VISION,
    "nothing any more": _LEFT_OVER,
}
"""Subject → its flags. Of a pair ``--x``, ``--no-x`` the first is listed."""
# fmt: on
