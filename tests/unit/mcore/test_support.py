"""The support matrix: refused by one line that names the flag and the fix; nothing ignored in silence."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megatron.elastic.config import ElasticConfig
from megatron.elastic.mcore.args import flag_table, support
from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.args.plans import PLANS
from megatron.elastic.mcore.args.substitutions import Installed
from megatron.elastic.mcore.args.support import FEATURES, check, classify, docs
from tests.unit.mcore.arguments_of_a_run import EXPERTS, plain

ROOT = Path(__file__).resolve().parents[3]


PREDICTS = {"mtp_num_layers": 1, "position_embedding_type": "rope", "pipeline_model_parallel_size": 1}
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
    ("--moe-router-force-load-balancing", {"moe_router_force_load_balancing": True}),
    ("--moe-router-force-biased", {"moe_router_force_biased": 0.0}),
    ("--fake-process-group", {"fake_process_group": True}),
    ("--rl-use-sequence-packing", {"rl_use_sequence_packing": True}),
    ("--mrope-section", {"position_embedding_type": "mrope"}),
    ("--use-legacy-models", {"use_legacy_models": True}),
    ("--vision-pretraining", {"vision_pretraining": True, "vision_pretraining_type": "dino"}),
    ("--te-precision-config-file", {"te_precision_config_file": "types.yaml"}),
    ("--kitchen-config-file", {"kitchen_config_file": "types.yaml"}),
    ("--kitchen-recipe-number", {"kitchen_recipe_number": 0}),
    ("--batch-invariant-mode", {"batch_invariant_mode": True}),
    ("--inference-rng-tracker", {"inference_rng_tracker": True}),
    ("--mtp-hybrid-override-pattern", {"mtp_hybrid_override_pattern": "M", **PREDICTS}),
    ("--ckpt-convert-update-legacy-dist-opt-format", {"ckpt_convert_update_legacy_dist_opt_format": True}),
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
    {"mtp_hybrid_override_pattern": "M"},
    {"vision_pretraining": True, "vision_pretraining_type": "classify"},
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


def test_the_flag_that_was_given_is_the_one_named() -> None:
    asked = plain(hybrid_layer_pattern=None, hybrid_override_pattern="M-M*")
    with pytest.raises(BadInput, match=r"^--hybrid-override-pattern "):
        check(asked, ElasticConfig(), "cuda", ["--hybrid-override-pattern=M-M*"])


def test_a_flag_that_no_table_knows_is_named_not_ignored() -> None:
    words = ["--micro-batch-size", "2", "--another-one", "--some-future-flag=3", "--elastic-mirrors", "2"]
    (warning,) = check(plain(), ElasticConfig(), "cpu", words)
    assert warning.endswith("--another-one, --some-future-flag")


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
        ("--flight-recorder-trace-buffer-size", "honoured", "no effect"),
        ("--disable-flight-recorder-dump-on-timeout", "honoured", "no effect"),
        ("--inprocess-hard-timeout", "honoured", "refused"),
        ("--fim-fragment-rate", "honoured", "refused"),
        ("--fp8-interval", "refused", "honoured"),
        ("--moe-hybridep-num-sms", "substituted", "no effect"),
        ("--rl-skip-bos-token", "no effect", "no effect"),
        ("--no-rl-skip-bos-token", "no effect", "no effect"),
        ("--checkpoint-activations", "refused", "refused"),
        ("--no-position-embedding", "honoured", "honoured"),
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


def test_all_that_is_refused_is_told_at_once() -> None:
    with pytest.raises(BadInput) as caught:
        check(plain(moe_use_upcycling=True, fp8="hybrid", micro_batch_size=1), ElasticConfig(spares=1), "cpu", [])
    assert [text.split()[0] for text in caught.value.texts] == [
        "--moe-use-upcycling",
        "--elastic-spares",
        "--fp8-format",
    ]


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
