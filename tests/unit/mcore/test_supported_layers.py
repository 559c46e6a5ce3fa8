"""Experts, further tokens, FP8 and what a CPU's layers compute: each refusal is one line."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest

from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.args.combinations import pickled_scales, precision_faults, prediction_faults
from megatron.elastic.mcore.args.support import check
from tests.unit.mcore.arguments_of_a_run import EXPERTS, plain

FP8: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": "blockwise", "transformer_impl": "transformer_engine"}


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize(
    ("given", "words", "mended"),
    [
        (
            {"recompute_modules": ["mlp"]},
            "--recompute-modules mlp .* --disable-bias-linear",
            {"add_bias_linear": False},
        ),
        ({"moe_latent_size": 8}, "--moe-latent-size 8 needs the layers of Transformer", {"moe_latent_size": None}),
        ({"fp32_residual_connection": True, "bf16": True}, "--fp32-residual-connection with", {"bf16": False}),
    ],
)
def test_what_the_layers_of_a_cpu_cannot_compute_is_refused(
    elastic: bool, given: dict[str, Any], words: str, mended: dict[str, Any]
) -> None:
    asked = {"elastic": elastic, **given}
    with pytest.raises(BadInput, match=words):
        check(plain(**asked), ElasticConfig(), "cpu", [])
    check(plain(**asked), ElasticConfig(), "cuda", [])
    check(plain(**{**asked, **mended}), ElasticConfig(), "cpu", [])


@pytest.mark.parametrize(
    ("given", "environ", "told"),
    [
        ({"fp8_recipe": "delayed", "save": "here"}, {}, True),
        ({"fp8_recipe": "delayed", "load": "here"}, {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "0"}, True),
        ({"fp8_recipe": "delayed", "load": "here"}, {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}, False),
        ({"fp8_recipe": "delayed"}, {}, False),
        ({"fp8_recipe": "tensorwise", "save": "here"}, {}, False),
    ],
)
def test_scales_that_transformer_engine_would_not_read_are_warned_of(tmp_path, monkeypatch, given, environ, told):
    engine = tmp_path / "transformer_engine"
    (engine / "pytorch").mkdir(parents=True)
    (engine / "__init__.py").touch()
    (engine / "pytorch" / "_extra_state.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    args = plain(**{"fp8": "hybrid", "save": None, "load": None, **given})
    found = pickled_scales(args, environ)
    assert bool(found) is told and all("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1" in line for line in found)
    (engine / "pytorch" / "_extra_state.py").unlink()  # an older one
    assert pickled_scales(args, environ) == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sequence_parallel": False}, "--num-experts .* --sequence-parallel"),
        ({"add_bias_linear": True}, "--num-experts.* --disable-bias-linear"),
    ],
)
def test_experts_that_cannot_be_trained_are_refused(given: dict[str, Any], words: str) -> None:
    whole = {"micro_batch_size": 1, "calculate_per_token_loss": True, **EXPERTS}
    check(plain(**whole), ElasticConfig(), "cpu", [])
    with pytest.raises(BadInput, match=words):
        check(plain(**{**whole, **given}), ElasticConfig(), "cpu", [])


@pytest.mark.parametrize(
    ("given", "config", "platform", "words"),
    [
        (
            {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 3},
            ElasticConfig(),
            "cpu",
            "--expert-tensor-parallel-size 3 is not elastic: use a divisor of 4",
        ),
        (
            {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 1},
            ElasticConfig(),
            "cpu",
            "--expert-tensor-parallel-size 1 .* --expert-model-parallel-size above 1",
        ),
        (
            {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 2, "expert_model_parallel_size": 3},
            ElasticConfig(),
            "cpu",
            "--expert-model-parallel-size 3: 6 ranks have all experts together. .* a divisor of 4",
        ),
        (
            {"use_tp_pp_dp_mapping": True, "pipeline_model_parallel_size": 2},
            ElasticConfig(),
            "cpu",
            "--use-tp-pp-dp-mapping with --expert-model-parallel-size 2",
        ),
        ({"calculate_per_token_loss": True}, ElasticConfig(exact=True), "cpu", "--elastic-exact .* leave one out"),
        ({}, ElasticConfig(policy="recycle"), "cpu", "--elastic-policy recycle"),
        ({"transformer_impl": "transformer_engine"}, ElasticConfig(), "cuda", "--transformer-impl local"),
        ({"moe_grouped_gemm": True}, ElasticConfig(), "cuda", "--moe-grouped-gemm .* leave it out"),
    ],
)
def test_shared_experts_that_do_not_hold_are_refused(
    given: dict[str, Any], config: ElasticConfig, platform: str, words: str
) -> None:
    shared = {**EXPERTS, "expert_model_parallel_size": 2, "tensor_model_parallel_size": 1, "micro_batch_size": 1}
    check(plain(**shared), ElasticConfig(), platform, [])
    with pytest.raises(BadInput, match=words):
        check(plain(**{**shared, **given}), config, platform, [])


@pytest.mark.parametrize(
    ("tensor", "parts", "homes", "mapping"), [(4, 1, 2, False), (4, 2, 2, True), (2, 2, 4, False), (2, 1, 4, False)]
)
def test_ranks_that_share_experts_may_be_more_or_fewer_than_a_tensor_parallel_group(
    tensor: int, parts: int, homes: int, mapping: bool
) -> None:
    sizes = {"tensor_model_parallel_size": tensor, "expert_tensor_parallel_size": parts}
    shared = {**EXPERTS, **sizes, "expert_model_parallel_size": homes, "use_tp_pp_dp_mapping": mapping}
    check(plain(**shared, pipeline_model_parallel_size=2), ElasticConfig(), "cpu", [])


@pytest.mark.parametrize(
    ("given", "config", "words"),
    [
        ({"context_parallel_size": 2}, ElasticConfig(), "--context-parallel-size"),
        ({"heterogeneous_layers_config_path": "x"}, ElasticConfig(), "--heterogeneous-layers-config-path"),
        ({"pipeline_model_parallel_layout": "Et|m|L"}, ElasticConfig(), "layout Et.m.L: .* in front of L"),
        ({"pipeline_model_parallel_layout": [["embedding"], ["mtp"], ["loss"]]}, ElasticConfig(), "in front of L"),
        ({"position_embedding_type": "learned_absolute"}, ElasticConfig(), "use rope"),
        ({"untie_embeddings_and_output_weights": False}, ElasticConfig(), "--untie-embeddings-and-output-weights"),
        ({}, ElasticConfig(exact=True), "--elastic-exact .* uses weights several times"),
    ],
)
def test_further_tokens_that_do_not_hold_are_refused(given: dict[str, Any], config: ElasticConfig, words: str) -> None:
    further = {
        "mtp_num_layers": 1,
        "micro_batch_size": 1,
        "position_embedding_type": "rope",
        "pipeline_model_parallel_size": 2,
        "untie_embeddings_and_output_weights": True,
        "calculate_per_token_loss": True,
    }
    check(plain(**further), ElasticConfig(), "cpu", [])
    check(
        plain(**further | {"pipeline_model_parallel_size": 1, "untie_embeddings_and_output_weights": False}),
        ElasticConfig(),
        "cpu",
        [],
    )
    with pytest.raises(BadInput, match=words):
        check(plain(**{**further, **given}), config, "cpu", [])
    assert len(list(prediction_faults(plain(**{**further, **given}), config))) == 1


@pytest.mark.parametrize("layout", ["Et|(tt|)*2mL", "Ettt|m*2L", [["embedding", "decoder"], ["mtp", "loss"]]])
def test_layers_for_further_tokens_may_be_in_a_layout_where_the_loss_is(layout: Any) -> None:
    given = {"mtp_num_layers": 1, "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True}
    given |= {"pipeline_model_parallel_size": 2, "micro_batch_size": 1}
    biased = {**EXPERTS, "moe_router_enable_expert_bias": True, "pipeline_model_parallel_layout": layout}
    assert not list(prediction_faults(plain(**given, **biased), ElasticConfig()))


def test_experts_move_between_ranks_that_share_them() -> None:
    homes, shared = ElasticConfig(expert_balance="homes"), {**EXPERTS, "expert_model_parallel_size": 4}
    check(plain(**shared), homes, "cpu", [])
    check(plain(**shared, tensor_model_parallel_size=2), homes, "cpu", [])
    for given in (EXPERTS, {"num_experts": None}):
        with pytest.raises(BadInput, match="homes moves experts that ranks share: add --expert-model-parallel-size"):
            check(plain(**given), homes, "cpu", [])
    inside = {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    with pytest.raises(BadInput, match=r"between groups of 4 ranks .* each of these groups has all experts"):
        check(plain(**shared, **inside), homes, "cpu", [])


@pytest.mark.parametrize("policy", ["replicas", "lazarus"])
def test_replicas_are_of_experts_that_ranks_share(policy: Literal["replicas", "lazarus"]) -> None:
    shared = {**EXPERTS, "expert_model_parallel_size": 4}
    check(plain(**shared), ElasticConfig(expert_balance=policy, expert_replicas=6), "cpu", [])
    with pytest.raises(BadInput, match=f"{policy} moves experts that ranks share: add --expert-model-parallel-size"):
        check(plain(**EXPERTS), ElasticConfig(expert_balance=policy), "cpu", [])
    with pytest.raises(BadInput, match=r"--elastic-expert-replicas 7: .* use 6 or fewer"):
        check(plain(**shared), ElasticConfig(expert_balance=policy, expert_replicas=7), "cpu", [])
    with pytest.raises(BadInput, match="--elastic-exact adds up gradients by micro-batch") as caught:
        check(plain(**shared), ElasticConfig(expert_balance=policy, exact=True), "cpu", [])
    assert len(caught.value.texts) == 1
    with pytest.raises(ConfigError, match="--elastic-expert-replicas must be 1 or more"):
        ElasticConfig(expert_balance=policy, expert_replicas=0)


@pytest.mark.parametrize("policy", ["off", "homes"])
def test_a_number_of_replicas_takes_a_policy_that_makes_some(policy: Literal["off", "homes"]) -> None:
    with pytest.raises(ConfigError, match=f"--elastic-expert-balance {policy}, which makes no replicas: use"):
        ElasticConfig(expert_balance=policy, expert_replicas=2)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_fp8_is_elastic_with_every_recipe_of_transformer_engine(recipe: str) -> None:
    check(plain(**{**FP8, "fp8_recipe": recipe}), ElasticConfig(), "cuda", [])


def test_fp8_by_a_quantizer_of_ones_own_is_refused() -> None:
    with pytest.raises(BadInput, match=r"--fp8-quantizer-factory .*: use --fp8-recipe delayed, tensorwise") as error:
        check(plain(**{**FP8, "fp8_recipe": "custom"}), ElasticConfig(), "cuda", ["--fp8-format", "hybrid"])
    assert len(error.value.texts) == 1


@pytest.mark.parametrize(
    ("given", "platform", "words"),
    [
        ({}, "cpu", "--fp8-format hybrid needs Transformer Engine on a GPU"),
        ({}, "npu", "--fp8-format hybrid needs Transformer Engine on a GPU"),
        ({"transformer_impl": "local"}, "cuda", "leave out --transformer-impl local"),
        ({"num_experts": 8}, "cuda", "--fp8-format hybrid with --num-experts: .* use --bf16"),
        ({"fp8_dot_product_attention": True}, "cuda", "--fp8-dot-product-attention: .* leave it out"),
        ({"fp8_multi_head_attention": True}, "cuda", "--fp8-multi-head-attention: .* leave it out"),
        ({"recompute_granularity": "full"}, "cuda", "--recompute-granularity full: .* use .* selective"),
        ({"fp8_recipe": "delayed", "mtp_num_layers": 1}, "cuda", "--mtp-num-layers: .* --fp8-recipe tensorwise"),
        (
            {"fp8_recipe": "delayed", "heterogeneous_layers_config_path": "layers.json"},
            "cuda",
            "--heterogeneous-layers-config-path: .* --fp8-recipe tensorwise",
        ),
    ],
)
def test_what_does_not_hold_in_fp8_is_refused(given: dict[str, Any], platform: str, words: str) -> None:
    assert not list(precision_faults(plain(**FP8), "cuda"))
    [fault] = precision_faults(plain(**{**FP8, **given}), platform)
    assert re.search(words, fault)
