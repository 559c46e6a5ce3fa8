#!/usr/bin/env bash
# A 7B GPT on nodes of NVIDIA GPUs; run it on every node.
#
#   MASTER_ADDR=node0 NUM_NODES=2 NODE_RANK=0 \
#       bash scripts/pretrain_gpt_cuda.sh CHECKPOINT_PATH TENSORBOARD_PATH TOKENIZER_MODEL DATA_PATH [FLAGS...]
#
# With ETCD_ENDPOINT and RUN_ID instead of MASTER_ADDR the launchers meet in etcd and any node may fail (scripts/nodes.sh).
# Several nodes need MEGATRON_ELASTIC_SECRET, the same on all (openssl rand -hex 16), or MEGATRON_ELASTIC_SECRET_FILE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export CUDA_DEVICE_MAX_CONNECTIONS=1 # orders communication and compute where Megatron overlaps them

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NUM_NODES=${NUM_NODES:-1}
NODE_RANK=${NODE_RANK:-0}

CHECKPOINT_PATH=${1:?CHECKPOINT_PATH}
TENSORBOARD_LOGS_PATH=${2:?TENSORBOARD_PATH}
TOKENIZER_MODEL=${3:?TOKENIZER_MODEL, folder of a Hugging Face tokenizer}
DATA_PATH=${4:?DATA_PATH, prefix_text_document}

source scripts/nodes.sh
elastic_nodes "$NUM_NODES" "$NODE_RANK"

DISTRIBUTED_ARGS=(
    --nproc-per-node "$GPUS_PER_NODE"
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
    --seq-length 2048
    --max-position-embeddings 2048
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --bf16
    --lr 3.0e-4
    --min-lr 3.0e-5
    --lr-decay-style cosine
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
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
    --split "949,50,1"
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --save-interval 1000
    --eval-interval 1000
    --eval-iters 10
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
