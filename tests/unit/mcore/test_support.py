"""The support matrix: refused by one line that names the flag and the fix; nothing ignored in silence."""

from __future__ import annotations

import re
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.mcore.args import flag_table, support
from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.args.combinations import pickled_scales, precision_faults, prediction_faults
from megatron.elastic.mcore.args.plans import PLANS
from megatron.elastic.mcore.args.substitutions import Installed
from megatron.elastic.mcore.args.support import FEATURES, check, classify, docs

ROOT = Path(__file__).resolve().parents[3]


def plain(**given: Any) -> Namespace:
    """Arguments of a run that asks for nothing special."""
    base = {
        "elastic": True,
        "context_parallel_size": 1,
        "num_experts": None,
        "deterministic_mode": False,
        "sequence_parallel": False,
        "add_bias_linear": True,
        "expert_model_parallel_size": 1,
        "optimizer": "adam",
        "ckpt_format": "torch_dist",
        "attention_dropout": 0.1,
        "transformer_impl": "local",
        "cuda_graph_impl": "none",
        "dataloader_type": None,
        "error_injection_rate": 0,
        "tensor_model_parallel_size": 2,
        "fp8_recipe": "delayed",
        "mtp_num_layers": None,
        "heterogeneous_layers_config_path": None,
        "bf16": False,
        "fp16": False,
    }
    return Namespace(**{**base, **given})


EXPERTS = {"num_experts": 8, "sequence_parallel": True, "add_bias_linear": False}

REFUSED_WITH_ELASTIC: list[tuple[str, dict[str, Any]]] = [
    ("--hybrid-context-parallel", {"hybrid_context_parallel": True}),
    ("--moe-router-load-balancing-type", {**EXPERTS, "moe_router_load_balancing_type": ["global_aux_loss"]}),
    ("--use-torch-fsdp2", {"use_torch_fsdp2": True}),
    ("--use-megatron-fsdp", {"use_megatron_fsdp": True}),
    ("--fp8-quantizer-factory", {"fp8": "hybrid", "fp8_recipe": "custom"}),
    ("--fp4-format", {"fp4": "e2m1"}),
    ("--cuda-graph-impl", {"cuda_graph_impl": "local"}),
    ("--optimizer", {"optimizer": "soap"}),
    ("--optimizer", {"optimizer": "adaptive_muon"}),
    ("--qk-clip", {"qk_clip": True}),
    ("--log-max-attention-logit", {"log_max_attention_logit": True}),
    ("--ckpt-convert-format", {"ckpt_convert_format": "torch"}),
    ("--save-wgrads-interval", {"save_wgrads_interval": 2}),
    ("--save-dgrads-interval", {"save_dgrads_interval": 2}),
    ("--ckpt-format", {"ckpt_format": "fsdp_dtensor"}),
    ("--dataloader-type", {"dataloader_type": "external"}),
    ("--fim-data", {"fim_data": True}),
    ("--inprocess-restart", {"inprocess_restart": True}),
    ("--phase-transition-iterations", {"phase_transition_iterations": "3"}),
]


@pytest.mark.parametrize(("flag", "asked"), REFUSED_WITH_ELASTIC, ids=[flag for flag, _ in REFUSED_WITH_ELASTIC])
def test_refused_with_elastic_by_one_line(flag: str, asked: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as caught:
        check(plain(**asked), ElasticConfig(), "cuda", [flag, "x"])
    text = str(caught.value)
    assert text.startswith(flag) and "--elastic: " in text and "\n" not in text


PASSES: list[dict[str, Any]] = [
    {},
    {"sequence_parallel": True},
    {"bf16": True},
    {"fp16": True},
    {"recompute_granularity": "full"},
    {"test_mode": True, "qk_layernorm": True},
    {"use_tp_pp_dp_mapping": True},
    {"ckpt_format": "torch"},
    {"grad_reduce_in_bf16": True},
    {"optimizer": "sgd"},
    {"dataloader_type": "cyclic"},
    {"rampup_batch_size": [8, 8, 100]},
    {"step_batch_size_schedule": "0:8"},
    {"num_virtual_stages_per_pipeline_rank": 2},
]


@pytest.mark.parametrize("asked", PASSES)
def test_what_works_passes_without_a_word(asked: dict[str, Any]) -> None:
    assert check(plain(**asked), ElasticConfig(), "cpu", ["--micro-batch-size", "2"]) == ()


@pytest.mark.parametrize(
    ("given", "platform", "refused"),
    [
        ({"pipeline_model_parallel_size": 2}, "cpu", True),
        ({"pipeline_model_parallel_size": 2}, "cuda", True),
        ({"pipeline_model_parallel_size": 2, "transformer_impl": "transformer_engine"}, "cuda", False),
        ({"pipeline_model_parallel_size": 2, "transformer_impl": "transformer_engine"}, "cpu", True),
        ({"pipeline_model_parallel_size": 2, "create_attention_mask_in_dataloader": False}, "cpu", False),
        ({"pipeline_model_parallel_size": 2, "elastic": False}, "cpu", False),
        ({"pipeline_model_parallel_size": 1}, "cpu", False),
    ],
)
def test_masks_that_depend_on_the_stage_are_refused(given: dict[str, Any], platform: str, refused: bool) -> None:
    args = plain(reset_attention_mask=True, **given)
    with pytest.raises(BadInput, match="--reset-attention-mask") if refused else nullcontext():
        check(args, ElasticConfig(), platform, [])


def test_without_elastic_megatrons_own_features_pass() -> None:
    for _, asked in REFUSED_WITH_ELASTIC:
        check(plain(elastic=False, **asked), ElasticConfig(), "cuda", [])


PARTS = {"context_parallel_size": 2, "seq_length": 32, "position_embedding_type": "rope"}


@pytest.mark.parametrize("more", [{}, EXPERTS, {**EXPERTS, "expert_model_parallel_size": 4}])
def test_ranks_may_share_the_sequence_on_a_cpu_with_elastic(more: dict[str, Any]) -> None:
    check(plain(**PARTS, **more), ElasticConfig(), "cpu", [])


@pytest.mark.parametrize(
    ("asked", "config", "named"),
    [
        ({"multi_latent_attention": True}, ElasticConfig(), "--multi-latent-attention"),
        ({"window_size": (8, 0)}, ElasticConfig(), "--window-size"),
        ({"position_embedding_type": "mrope"}, ElasticConfig(), "--position-embedding-type mrope"),
        ({"sequence_parallel": True, "seq_length": 34}, ElasticConfig(), "multiple of 4"),
        ({"micro_batch_size": 1}, ElasticConfig(exact=True), "--elastic-exact"),
        ({}, ElasticConfig(policy="torchft"), "--elastic-policy torchft"),
        ({}, ElasticConfig(spares=2), "--tensor-model-parallel-size 2 × --context-parallel-size 2"),
    ],
)
def test_what_does_not_hold_where_ranks_share_the_sequence(
    asked: dict[str, Any], config: ElasticConfig, named: str
) -> None:
    with pytest.raises(BadInput, match=named.replace("(", ".")):
        check(plain(**{**PARTS, **asked}), config, "cpu", [])


@pytest.mark.parametrize("asked", [{"context_parallel_size": 2}, {"fp8": "hybrid"}, {"use_torch_fsdp2": True}])
def test_what_needs_a_gpu_is_refused_on_a_cpu(asked: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="needs a GPU"):
        check(plain(elastic=False, **asked), ElasticConfig(), "cpu", [])


@pytest.mark.parametrize(
    ("platform", "config", "named"),
    [
        ("cuda", ElasticConfig(exact=True), "--elastic-exact needs --deterministic-mode"),
        ("cpu", ElasticConfig(exact=True, policy="torchft"), "--elastic-policy torchft"),
    ],
)
def test_what_exact_mode_cannot_keep_is_refused(platform: str, config: ElasticConfig, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        check(plain(), config, platform, [])


def test_exact_mode_on_a_device_needs_kernels_that_add_up_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    args, config = plain(deterministic_mode=True), ElasticConfig(exact=True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(BadInput, match=r"CUBLAS_WORKSPACE_CONFIG=:4096:8 alone: export it"):
        check(args, config, "cuda", [])
    check(args, config, "npu", [])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    check(args, config, "cuda", [])
    args.transformer_impl = "transformer_engine"
    engine = Installed("cuda", frozenset({"transformer_engine"}))
    monkeypatch.setattr(Installed, "detect", classmethod(lambda cls, platform: engine))
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    with pytest.raises(BadInput, match=r"attention adds up in one order with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 alone"):
        check(args, config, "cuda", [])
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    check(args, config, "cuda", [])


def test_device_memory_for_state_needs_a_device() -> None:
    with pytest.raises(BadInput, match=r"--elastic-state device needs an accelerator.*leave it out"):
        check(plain(), ElasticConfig(state="device"), "cpu", [])
    check(plain(), ElasticConfig(state="device"), "cuda", [])
    check(plain(), ElasticConfig(state="host"), "cpu", [])


def test_a_policy_of_smaller_groups_needs_groups_that_live_on() -> None:
    parking, living = ElasticConfig(policy="ntp", tensor="park"), ElasticConfig(policy="ntp", tensor="live-on")
    with pytest.raises(BadInput, match=r"--elastic-policy ntp .* use --elastic-tensor live-on"):
        check(plain(tensor_model_parallel_size=2), parking, "cpu", [])
    for fitting in (living, ElasticConfig(policy="ntp")):
        check(plain(tensor_model_parallel_size=2), fitting, "cpu", [])
    check(plain(tensor_model_parallel_size=1), parking, "cpu", [])


@pytest.mark.parametrize("asked", [{}, {"calculate_per_token_loss": True}, EXPERTS])
def test_exact_mode_takes_microbatches_of_any_size_and_loss(asked: dict[str, Any]) -> None:
    """What is computed from a micro-batch as a whole is its own: its mean, and the balance of its experts."""
    check(plain(**{**asked, "micro_batch_size": 4}), ElasticConfig(exact=True), "cpu", [])


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


def test_the_flag_that_was_given_is_the_one_named() -> None:
    asked = plain(hybrid_layer_pattern=None, hybrid_override_pattern="M-M*")
    with pytest.raises(BadInput, match=r"^--hybrid-override-pattern "):
        check(asked, ElasticConfig(), "cuda", ["--hybrid-override-pattern=M-M*"])


def test_a_flag_that_no_table_knows_is_named_not_ignored() -> None:
    words = ["--micro-batch-size", "2", "--onnx-safe", "--some-future-flag=3", "--elastic-mirrors", "2"]
    (warning,) = check(plain(), ElasticConfig(), "cpu", words)
    assert warning.endswith("--onnx-safe, --some-future-flag")


def test_each_of_the_most_used_flags_is_classified() -> None:
    assert len(flag_table.MOST_USED) >= 120 and len(set(flag_table.MOST_USED)) == len(flag_table.MOST_USED)
    unknown = [flag for flag in flag_table.MOST_USED if classify(flag) is None]
    assert unknown == []


@pytest.mark.parametrize(
    ("flag", "cpu", "elastic"),
    [
        ("--micro-batch-size", "honoured", "honoured"),
        ("--transformer-impl", "substituted", "honoured"),
        ("--overlap-grad-reduce", "honoured", "honoured"),
        ("--context-parallel-size", "refused", "honoured"),
        ("--num-experts", "honoured", "honoured"),
        ("--expert-model-parallel-size", "honoured", "honoured"),
        ("--enable-cuda-graph", "substituted", "refused"),
        ("--check-for-large-grads", "honoured", "no effect"),
        ("--empty-unused-memory-level", "honoured", "no effect"),
        ("--attention-output-gate", "honoured", "honoured"),
    ],
)
def test_classes(flag: str, cpu: str, elastic: str) -> None:
    assert classify(flag) == (cpu, elastic)


def test_no_flag_stands_in_two_rows_that_disagree() -> None:
    flags = [flag for row in FEATURES for flag in row.flags]
    assert len(flags) == len(set(flags))
    assert not flag_table.HONOURED & {flag for row in FEATURES if row.elastic == "refused" for flag in row.flags}


def test_every_refusal_says_what_to_do() -> None:
    assert [row.name for row in FEATURES if "refused" in (row.cpu, row.elastic) and not row.fix] == []


def test_each_refused_feature_has_a_plan_or_a_reason_for_none() -> None:
    assert list(PLANS) == [row.name for row in FEATURES if row.elastic == "refused"]


def test_the_support_page_is_current() -> None:
    assert (ROOT / "docs/support.md").read_text() == docs(), support.__doc__.splitlines()[-2].strip()


def test_spares_take_the_place_of_whole_tensor_parallel_groups() -> None:
    check(plain(), ElasticConfig(spares=2), "cpu", [])
    with pytest.raises(BadInput, match="--elastic-spares 1 is not a multiple of --tensor-model-parallel-size 2"):
        check(plain(), ElasticConfig(spares=1), "cpu", [])


@pytest.mark.parametrize(
    ("given", "config", "words"),
    [
        ({"world_size": 1}, ElasticConfig(), ("one rank", "--nproc-per-node")),
        ({"world_size": 4}, ElasticConfig(mirrors=0), ("--elastic-mirrors 0", "--elastic-mirrors 1")),
        ({"world_size": 2}, ElasticConfig(mirrors=5), ("--elastic-mirrors 5", "2 ranks", "give --elastic-mirrors 1")),
        ({"world_size": 2, "pipeline_model_parallel_size": 2}, ElasticConfig(), ("wait until", "4 ranks", "-spares")),
        (
            {"world_size": 2, "tensor_model_parallel_size": 2},
            ElasticConfig(respawn=False),
            ("no rank to compute it", "start 4 ranks"),
        ),
    ],
)
def test_a_layout_whose_first_loss_stops_training_is_warned_of(
    given: dict[str, Any], config: ElasticConfig, words: tuple[str, ...]
) -> None:
    base = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    (warning,) = support.thin_copies(plain(**{**base, **given}), config)
    assert "\n" not in warning and all(word in warning for word in words), warning


@pytest.mark.parametrize(
    ("world", "config"), [(2, ElasticConfig()), (4, ElasticConfig(mirrors=3)), (1, ElasticConfig(spares=1))]
)
def test_a_layout_with_copies_elsewhere_is_not(world: int, config: ElasticConfig) -> None:
    args = plain(world_size=world, tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    assert support.thin_copies(args, config) == ()


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


def test_all_that_is_refused_is_told_at_once() -> None:
    with pytest.raises(BadInput) as caught:
        check(plain(moe_use_upcycling=True, fp8="hybrid", micro_batch_size=1), ElasticConfig(spares=1), "cpu", [])
    assert [text.split()[0] for text in caught.value.texts] == [
        "--moe-use-upcycling",
        "--elastic-spares",
        "--fp8-format",
    ]


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
        ({"moe_token_dispatcher_type": "flex"}, ElasticConfig(), "cuda", "--moe-token-dispatcher-type flex"),
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


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        ({}, "launch --nproc-per-node 1 train.py ..."),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "8"}, "launch --nproc-per-node 8 train.py ..."),
        (
            {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "GROUP_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "6"},
            "launch --nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr a --master-port 6 train.py ...",
        ),
    ],
)
def test_elastic_without_its_launcher_is_answered_with_the_command(environ: dict[str, str], command: str) -> None:
    with pytest.raises(BadInput) as caught:
        support.check_launcher(environ, ["train.py", "--elastic"])
    assert command in str(caught.value)
    support.check_launcher({**environ, "MEGATRON_ELASTIC_RUN_ID": "x"}, ["train.py"])


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


FP8: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": "blockwise", "transformer_impl": "transformer_engine"}


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
