#!/usr/bin/env bash
# A 7B GPT on nodes of Ascend NPUs; run it on every node. Contract-tested only: see README, "what was run where".
#
#   MASTER_ADDR=node0 NNODES=2 NODE_RANK=0 \
#       bash scripts/pretrain_gpt_ascend.sh CHECKPOINT_PATH TENSORBOARD_PATH TOKENIZER_MODEL DATA_PATH [FLAGS...]
#
# With ETCD_ENDPOINT and RUN_ID instead of MASTER_ADDR the launchers meet in etcd and any node may fail (scripts/nodes.sh).
# Several nodes need MEGATRON_ELASTIC_SECRET, the same on all (openssl rand -hex 16), or MEGATRON_ELASTIC_SECRET_FILE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True
# The elastic runtime interrupts collectives itself; HCCL's own time-out is only the last resort.
export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-3600}
export HCCL_EXEC_TIMEOUT=${HCCL_EXEC_TIMEOUT:-3600}

NPUS_PER_NODE=${NPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}

CHECKPOINT_PATH=${1:?CHECKPOINT_PATH}
TENSORBOARD_LOGS_PATH=${2:?TENSORBOARD_PATH}
TOKENIZER_MODEL=${3:?TOKENIZER_MODEL, folder of a Hugging Face tokenizer}
DATA_PATH=${4:?DATA_PATH, prefix_text_document}

source scripts/nodes.sh
elastic_nodes "$NNODES" "$NODE_RANK"

DISTRIBUTED_ARGS=(
    --nproc-per-node "$NPUS_PER_NODE"
    "${NODE_ARGS[@]}"
)

ELASTIC_ARGS=(
    --elastic
    --elastic-mirrors "$MIRRORS"
    --elastic-event-log "$TENSORBOARD_LOGS_PATH/events"
)

GPT_MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --untie-embeddings-and-output-weights
    --disable-bias-linear
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 5000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.01
    --clip-grad 1.0
    --bf16
    --lr 1.25e-6
    --min-lr 1.25e-7
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion
    --calculate-per-token-loss
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --sequence-parallel
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --split "100,0,0"
)

EVAL_AND_LOGGING_ARGS=(
    --distributed-backend nccl # the redirection of torch.cuda makes it HCCL
    --transformer-impl local
    --log-interval 1
    --save-interval 1000
    --eval-interval 1000
    --eval-iters 0
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --ckpt-format torch_dist
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
)

elastic_launch "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${ELASTIC_ARGS[@]}" \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "${@:5}"
