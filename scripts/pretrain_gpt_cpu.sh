#!/usr/bin/env bash
# A small GPT on one machine without a GPU: TP 1 x PP 2 x DP 2.
#
#   bash scripts/pretrain_gpt_cpu.sh CHECKPOINT_PATH TENSORBOARD_PATH TOKENIZER_MODEL DATA_PATH [FLAGS...]
#
# Tokenizer and data as scripts/quickstart.sh leaves them in out/quickstart
# (tokenizer/tiktoken.json, corpus_text_document), or as tools/preprocess_data.py makes them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=1 # as many processes as cores: threads would only get in each other's way

CHECKPOINT_PATH=${1:?CHECKPOINT_PATH}
TENSORBOARD_LOGS_PATH=${2:?TENSORBOARD_PATH}
TOKENIZER_MODEL=${3:?TOKENIZER_MODEL, e.g. out/quickstart/tokenizer/tiktoken.json}
DATA_PATH=${4:?DATA_PATH without suffix, e.g. out/quickstart/corpus_text_document}

DISTRIBUTED_ARGS=(
    --nproc-per-node "${WORKERS:-4}"
    --standalone
)

ELASTIC_ARGS=(
    --elastic
    --elastic-event-log "$TENSORBOARD_LOGS_PATH/events"
)

GPT_MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 128
    --max-position-embeddings 128
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 16
    --train-iters 200
    --weight-decay 0.1
    --init-method-std 0.02
    --clip-grad 1.0
    --lr 2.0e-3
    --min-lr 2.0e-4
    --lr-decay-style cosine
    --lr-warmup-iters 10
    --calculate-per-token-loss
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 2
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --data-cache-path "$CHECKPOINT_PATH/data-cache"
    --split "98,2,0"
    --tokenizer-type TikTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --tiktoken-pattern v1
    --tiktoken-num-special-tokens 8
    --vocab-size 2048
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 1
    --save-interval 100
    --eval-interval 100
    --eval-iters 2
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --ckpt-format torch_dist
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
)

exec python -m megatron.elastic.launch "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${ELASTIC_ARGS[@]}" \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "${@:5}"
