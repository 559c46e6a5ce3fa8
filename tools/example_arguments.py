"""Arguments of five models as Megatron-LM's and Megatron-Bridge's own examples train them.

Only what the support matrix judges, and what Megatron's parser needs, is listed: paths, learning rates and logging
are left out. Of Bridge's recipes, which are Python, these are the flags with the same meaning on H100 GPUs.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

__all__ = ["EXAMPLES", "Example"]


@dataclass(frozen=True)
class Example:
    """One model: where its settings are from, the number of ranks, and its arguments."""

    model: str
    source: str
    ranks: int
    text: str

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.text)


EXAMPLES: tuple[Example, ...] = (
    Example(
        "GPT-3 175B",
        "Megatron-LM `examples/gpt3/train_gpt3_175b_distributed.sh`",
        1024,
        """
        --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
        --attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375
        --train-iters 500000 --lr 6.0e-5 --fp16 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
        --split 949,50,1 --eval-interval 1000 --eval-iters 10
        """,
    ),
    Example(
        "Llama-3 8B",
        "Megatron-LM `examples/llama/train_llama3_8b_h100_fp8.sh`, bf16",
        8,
        """
        --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
        --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
        --max-position-embeddings 8192 --position-embedding-type rope --swiglu --normalization RMSNorm
        --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear
        --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr 0.00015 --decoupled-lr 5.0e-4
        --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
        --empty-unused-memory-level 1 --exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce
        --overlap-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel
        --no-create-attention-mask-in-dataloader --no-mmap-bin-files --ckpt-format torch_dist --eval-interval 100
        """,
    ),
    Example(
        "Llama-3 8B, FP8",
        "the same script as it is",
        8,
        """
        --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --max-position-embeddings 8192
        --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr 0.00015 --bf16
        --grad-reduce-in-bf16 --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max
        --fp8-param-gather --use-distributed-optimizer --eval-interval 100
        """,
    ),
    Example(
        "Mixtral 8x7B",
        "Megatron-LM `examples/mixtral/train_mixtral_8x7b_distributed.sh`",
        64,
        """
        --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
        --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --normalization RMSNorm
        --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --group-query-attention
        --num-query-groups 8 --no-masked-softmax-fusion --num-experts 8 --moe-router-topk 2
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
        --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce --micro-batch-size 1
        --global-batch-size 256 --lr 1e-4 --train-iters 500000 --bf16 --tensor-model-parallel-size 1
        --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer
        --sequence-parallel --eval-interval 1000
        """,
    ),
    Example(
        "DeepSeek-V3",
        "Megatron-Bridge `deepseek_v3_pretrain_1024gpu_h100_bf16_config`",
        1024,
        """
        --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
        --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --normalization RMSNorm
        --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --multi-latent-attention
        --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
        --qk-layernorm --num-experts 256 --moe-layer-freq [0]*3+[1]*58 --moe-ffn-hidden-size 2048
        --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8
        --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-score-function sigmoid
        --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32
        --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type flex
        --moe-grouped-gemm --moe-permute-fusion --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
        --pipeline-model-parallel-layout Et*4|(tttt|)*14tmL --micro-batch-size 1 --global-batch-size 4096
        --train-iters 1000000 --lr 3e-4 --bf16 --grad-reduce-in-bf16 --use-precision-aware-optimizer
        --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --tensor-model-parallel-size 2
        --pipeline-model-parallel-size 16 --expert-model-parallel-size 64 --expert-tensor-parallel-size 1
        --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl te --manual-gc --manual-gc-interval 5
        --eval-interval 2000
        """,
    ),
    Example(
        "Qwen3 235B-A22B",
        "Megatron-Bridge `qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config`",
        256,
        """
        --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 --group-query-attention
        --num-query-groups 4 --kv-channels 128 --seq-length 4096 --max-position-embeddings 4096
        --position-embedding-type rope --normalization RMSNorm --swiglu --qk-layernorm --disable-bias-linear
        --untie-embeddings-and-output-weights --num-experts 128 --moe-ffn-hidden-size 1536 --moe-router-topk 8
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type flex
        --moe-grouped-gemm --moe-permute-fusion --micro-batch-size 1 --global-batch-size 256 --train-iters 300000
        --lr 3e-4 --bf16 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 16 --context-parallel-size 2
        --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --sequence-parallel
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --use-distributed-optimizer
        --overlap-grad-reduce --overlap-param-gather --cross-entropy-loss-fusion --cross-entropy-fusion-impl te
        --manual-gc --manual-gc-interval 100 --eval-interval 2000
        """,
    ),
)
