"""Flags with which Megatron itself does not train are refused by one line, with and without ``--elastic``."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megatron.elastic.config import ElasticConfig
from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.args.support import check, classify
from megatron.elastic.mcore.args.unfit import UNFIT
from tests.unit.mcore.arguments_of_a_run import plain

PADDING = "moe_router_padding_for_quantization"
FUSED, KERNELS = "inference_fuse_tp_communication", "inference_disable_triton_nvls_kernels"
SHAPES = "heterogeneous_layers_config_encoded_json"

Given = dict[str, Any]
REFUSED: list[tuple[str, Given, Given, str]] = [
    ("--batch-size", {"batch_size": 2}, {"batch_size": None}, "use --micro-batch-size"),
    ("--warmup", {"warmup": 1}, {"warmup": None}, "use --lr-warmup-fraction"),
    ("--model-parallel-size", {"model_parallel_size": 1}, {"model_parallel_size": None}, "use --tensor-model-parallel"),
    (
        "--checkpoint-activations",
        {"checkpoint_activations": True},
        {"checkpoint_activations": False},
        "use --recompute",
    ),
    ("--lazy-mpu-init", {"lazy_mpu_init": True}, {"lazy_mpu_init": False}, "leave it out"),
    ("--init-method-xavier-uniform", {"init_method_xavier_uniform": True}, {}, "use --init-method-std"),
    ("--config-logger-dir", {"config_logger_dir": "here"}, {"config_logger_dir": ""}, "leave it out"),
    (
        "--heterogeneous-layers-config-encoded-json",
        {SHAPES: "{}"},
        {SHAPES: None},
        "--heterogeneous-layers-config-path",
    ),
    (
        "--cache-mla-latents",
        {"cache_mla_latents": True, "multi_latent_attention": True},
        {"cache_mla_latents": True},
        "leave it out",
    ),
    ("--heterogeneous-layers-config-path", {"heterogeneous_layers_config_path": "no/such.json"}, {}, "give another"),
    ("--tokenizer-sentencepiece-legacy", {"tokenizer_sentencepiece_legacy": True}, {}, "leave it out"),
    ("--inference-fuse-tp-communication", {FUSED: True}, {FUSED: False}, "leave it out"),
    (
        "--inference-disable-triton-nvls-kernels",
        {KERNELS: True},
        {KERNELS: True, "transformer_impl": "inference_optimized"},
        "leave it out",
    ),
    (
        "--no-position-embedding",
        {"add_position_embedding": False, "position_embedding_type": "learned_absolute"},
        {"add_position_embedding": False, "position_embedding_type": "rope"},
        "use --position-embedding-type",
    ),
    ("--moe-router-padding-for-quantization", {PADDING: True}, {PADDING: False}, "needs --fp8-format"),
    (
        "--moe-router-padding-for-fp8",
        {"moe_router_padding_for_fp8": True},
        {"moe_router_padding_for_fp8": False},
        "needs --fp8-format",
    ),
    (
        "--dist-ckpt-strictness",
        {"dist_ckpt_strictness": "return_all", "load": "here"},
        {"dist_ckpt_strictness": "return_all", "load": None},
        "use log_all",
    ),
    (
        "--init-model-with-meta-device",
        {"init_model_with_meta_device": True},
        {"init_model_with_meta_device": False},
        "leave it out, or give --load",
    ),
    ("--no-initialization", {"perform_initialization": False}, {"perform_initialization": True}, "or give --load"),
]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize(("flag", "given", "mended", "fix"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused_by_one_line(flag: str, given: Given, mended: Given, fix: str, elastic: bool, platform: str) -> None:
    with pytest.raises(BadInput) as caught:
        check(plain(elastic=elastic, **given), ElasticConfig(), platform, [])
    (text,) = caught.value.texts
    assert text.startswith(f"{flag} ") and fix in text and "\n" not in text
    check(plain(**{"elastic": elastic, **mended}), ElasticConfig(), platform, [])


def test_each_row_is_tested() -> None:
    assert {row.flag for row in UNFIT} == {flag for flag, *_ in REFUSED}


@pytest.mark.parametrize(
    "given", [{"perform_initialization": False}, {"init_model_with_meta_device": True}], ids=["empty", "meta"]
)
def test_weights_may_come_from_a_checkpoint(tmp_path: Path, given: Given) -> None:
    args = plain(elastic=False, load=str(tmp_path), **given)
    with pytest.raises(BadInput, match="no checkpoint is loaded"):  # the first start of a job, which saves there
        check(args, ElasticConfig(), "cpu", [])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    check(args, ElasticConfig(), "cpu", [])


@pytest.mark.parametrize(
    ("text", "fits"),
    [("{}", False), ("[1]", False), ("{", False), ('{"hidden_act": "silu", "block_configs": []}', True)],
)
@pytest.mark.parametrize("encoded", [False, True])
def test_the_shapes_of_layers_are_read(tmp_path: Path, text: str, fits: bool, encoded: bool) -> None:
    path = tmp_path / "config.json"
    path.write_text("" if encoded else text)  # Megatron reads the text that it has
    given = {"heterogeneous_layers_config_path": str(path), SHAPES: text if encoded else None}
    with nullcontext() if fits else pytest.raises(BadInput, match="--heterogeneous-layers-config-path names no JSON"):
        check(plain(elastic=False, **given), ElasticConfig(), "cpu", [])


@pytest.mark.parametrize("fsdp", ["use_torch_fsdp2", "use_megatron_fsdp"])
def test_fsdp_gives_weights_their_values(fsdp: str) -> None:
    args = plain(elastic=False, init_model_with_meta_device=True, **{fsdp: True})
    check(args, ElasticConfig(), "cuda", [])


def test_padding_for_a_quantized_type_stays() -> None:
    given = {PADDING: True, "fp8": "hybrid", "fp8_recipe": "blockwise"}
    check(plain(elastic=False, **given), ElasticConfig(), "cuda", [])


def test_classes() -> None:
    assert classify("--lazy-mpu-init") == ("refused", "refused")
    assert classify("--no-initialization") == ("honoured", "honoured")
