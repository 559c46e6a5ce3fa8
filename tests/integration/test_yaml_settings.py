"""A job whose settings are in a YAML file is the job of the same flags, also where it loses a rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic_job import deviation_without_loss, elastic_job, largest_deviation
from tests.integration.kill_walk import ROUNDING
from tests.integration.test_cpu_layouts import logs, losses
from tests.integration.test_engine_parity import NO_DROPOUT, Case, run_plain
from tests.integration.test_rank_orders import BACK

FILE = """
language_model:
  num_layers: 4
  hidden_size: 32
  num_attention_heads: 4
  activation_func: swiglu
  hidden_dropout: 0.0
  attention_dropout: 0.0
  add_bias_linear: False
  layernorm_epsilon: 1.e-5
model_parallel:
  pipeline_model_parallel_size: 1
seq_length: 32
max_position_embeddings: 32
micro_batch_size: 2
global_batch_size: 16
lr: 1e-3
min_lr: 1e-4
lr_decay_style: cosine
lr_warmup_iters: 1
mock_data: True
tokenizer_type: NullTokenizer
vocab_size: 255
log_interval: 1
eval_interval: 1000
eval_iters: 0
split: 98,1,1
make_vocab_size_divisible_by: 64
num_workers: 0
seed: ${SEED_OF_JOB}
ckpt_format: torch_dist
"""
SAME = ("--swiglu", "--disable-bias-linear")


@pytest.mark.slow
def test_a_file_trains_as_its_flags_do(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(FILE)
    run_plain(tmp_path, [Case("plain", (1, 2, 2), SAME)])
    whole = elastic_job(tmp_path / "whole", 4, 1, 2, 5, *SAME, *NO_DROPOUT)
    faults = f"kill:rank=1,step=2,point=mid_backward;kill:rank=2,step=4,point=after_vote;{BACK}"
    injected = ("--elastic-allow-inject", "--elastic-inject", faults)
    killed = elastic_job(
        tmp_path / "killed",
        4,
        1,
        2,
        5,
        "--yaml-cfg",
        str(path),
        *injected,
        model=(),
        environment={"SEED_OF_JOB": "7"},
    )
    assert deviation_without_loss(whole, killed) <= ROUNDING
    assert largest_deviation(losses(logs(tmp_path, "plain")), killed.losses) < 2e-6
    assert {record.fields["lost_rank"] for record in killed.of("loss")} == {1, 2}
