"""The features of Megatron, and the treatment of each: data for the support matrix (``support``)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron.elastic.mcore.args import flag_table
from megatron.elastic.mcore.args.muon import uses_muon
from megatron.elastic.mcore.args.optimizers import STEPPED

__all__ = ["FEATURES", "Feature", "Verdict"]

Verdict = Literal["works", "refused", "substituted"]


@dataclass(frozen=True)
class Feature:
    """One row: the flags of a feature, and its treatment on a CPU without ``--elastic`` and with it anywhere."""

    name: str
    flags: tuple[str, ...]
    used: Callable[[Namespace], bool]
    cpu: Verdict
    elastic: Verdict
    fix: str
    """Why it is refused and what to do instead; for what works, a remark."""


def _any(*attributes: str) -> Callable[[Namespace], bool]:
    """Return a test whether any of these arguments is set."""
    return lambda args: any(bool(getattr(args, name, None)) for name in attributes)


def _other_than(attribute: str, *values: Any) -> Callable[[Namespace], bool]:
    """Return a test whether an argument that this Megatron has is none of ``values``."""
    return lambda args: getattr(args, attribute, values[0]) not in values


def _hybrid(args: Namespace) -> bool:
    """Return whether layers are not all attention: Megatron makes the pattern of further tokens one of the model."""
    patterns = _any("hybrid_layer_pattern", "hybrid_override_pattern")(args)
    return patterns or bool(args.mtp_num_layers and getattr(args, "mtp_hybrid_override_pattern", None))


def _distils_images(args: Namespace) -> bool:
    kind = getattr(args, "vision_pretraining_type", None)
    return bool(getattr(args, "vision_pretraining", False)) and kind == "dino"


def _kitchen(args: Namespace) -> bool:
    """Return whether Kitchen quantizes layers. Its flags are there if it is installed."""
    return any(getattr(args, name, None) is not None for name in ("kitchen_config_file", "kitchen_recipe_number"))


_GPU = "run it on a GPU"
_PLAIN = "run without --elastic"

# A table: one row a line, which the formatter would break up.
# fmt: off
FEATURES: tuple[Feature, ...] = (
    Feature("tensor, pipeline and data parallelism",
            ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
            lambda args: True, "works", "works",
            "after a loss stages may be uneven, and tensor-parallel groups smaller (--elastic-tensor)"),
    Feature("sequence parallelism", ("--sequence-parallel",), _any("sequence_parallel"), "works", "works",
            "it is off in smaller groups whose size does not divide the sequence"),
    Feature("distributed optimizer", ("--use-distributed-optimizer",), _any("use_distributed_optimizer"), "works",
            "works", "with --elastic the optimizer is always sharded, with mirrors"),
    Feature("activation recompute", ("--recompute-granularity", "--recompute-activations", "--recompute-method",
                                     "--recompute-num-layers"),
            _any("recompute_granularity", "recompute_activations"), "works", "works", ""),
    Feature("bf16", ("--bf16",), _any("bf16"), "works", "works", ""),
    Feature("fp16 with loss scaling", ("--fp16",), _any("fp16"), "works", "works",
            "on a CPU about ten times slower than fp32: use --bf16 there"),
    Feature("virtual pipeline stages", ("--num-layers-per-virtual-pipeline-stage",
                                        "--num-virtual-stages-per-pipeline-rank"),
            _any("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"), "works", "works",
            "with --elastic Megatron's interleaved order until a loss, and again when all are back"),
    Feature("context parallelism", ("--context-parallel-size", "--hierarchical-context-parallel-sizes",
                                    "--cp-comm-type"),
            lambda args: (args.context_parallel_size or 1) > 1, "refused", "works",
            "on Megatron's own layers with --elastic only; a cell that loses a rank cuts the sequence anew; "
            "where ranks share experts it waits"),
    Feature("context parallelism that varies by batch", ("--hybrid-context-parallel",),
            _any("hybrid_context_parallel"), "refused", "refused", f"its batches need Transformer Engine: {_GPU}, "
            f"{_PLAIN}"),
    Feature("mixture of experts", ("--num-experts", *flag_table.MOE), _any("num_experts"), "works", "works",
            "with --elastic layers are Megatron's own, and a micro-batch is never divided"),
    Feature("expert parallelism", ("--expert-model-parallel-size",),
            lambda args: (args.expert_model_parallel_size or 1) > 1, "works", "works",
            "with --elastic layers stay in their stages, and a tensor-parallel group that loses a rank waits"),
    Feature("experts with another tensor-parallel size than attention", ("--expert-tensor-parallel-size",),
            lambda args: getattr(args, "expert_tensor_parallel_size", None)
            not in (None, args.tensor_model_parallel_size), "works", "works",
            "with --elastic a divisor of the tensor-parallel size"),
    Feature("layers with and without experts", ("--moe-layer-freq",),
            lambda args: bool(args.num_experts) and getattr(args, "moe_layer_freq", 1) not in (1, None), "works",
            "works", "with --elastic layers of Megatron's own specification"),
    Feature("balancing experts over the global batch", ("--moe-router-load-balancing-type",),
            lambda args: bool(args.num_experts)
            and "global_aux_loss" in (getattr(args, "moe_router_load_balancing_type", None) or ()), "works", "refused",
            "that loss depends on which rank computed which micro-batch before: use aux_loss or seq_aux_loss"),
    Feature("balancing experts by a bias", ("--moe-router-enable-expert-bias",), _any("moe_router_enable_expert_bias"),
            "works", "works", "with --elastic each step's record has the bias, and counts are exact in bf16 too"),
    Feature("noise in the router's input", ("--moe-input-jitter-eps",), _any("moe_input_jitter_eps"), "works",
            "works", "with --elastic drawn by sample, as dropout is"),
    Feature("experts chosen by chance", ("--moe-router-force-load-balancing", "--moe-router-force-biased"),
            lambda args: bool(getattr(args, "moe_router_force_load_balancing", False))
            or getattr(args, "moe_router_force_biased", None) is not None, "works", "refused",
            f"each rank draws by itself, so a step that is computed again has other experts: {_PLAIN}"),
    Feature("losses of experts by layer", ("--moe-per-layer-logging",), _any("moe_per_layer_logging"), "works",
            "works", "with --elastic in TensorBoard, W&B and the event log"),
    Feature("experts from a dense checkpoint", ("--moe-use-upcycling",), _any("moe_use_upcycling"), "works", "refused",
            "convert the checkpoint first, without --elastic"),
    Feature("multi-token prediction", ("--mtp-num-layers", "--mtp-loss-scaling-factor"), _any("mtp_num_layers"),
            "works", "works", "a tensor-parallel group that loses a rank does not compute until it is whole"),
    Feature("multi-latent attention", ("--multi-latent-attention", *flag_table.MLA), _any("multi_latent_attention"),
            "works", "works", "a tensor-parallel group that loses a rank does not compute until it is whole"),
    Feature("linear and sparse attention variants", ("--experimental-attention-variant", *flag_table.LINEAR_ATTENTION),
            _any("experimental_attention_variant"), "refused", "refused",
            f"needs GPU kernels: {_GPU}, {_PLAIN}"),
    Feature("hybrid (state-space) models", ("--hybrid-layer-pattern", "--hybrid-override-pattern",
                                            "--mtp-hybrid-override-pattern"),
            _hybrid, "refused", "refused",
            f"needs GPU kernels: {_GPU}, {_PLAIN}, with a script for such models"),
    Feature("positions of three axes", ("--mrope-section",),
            lambda args: getattr(args, "position_embedding_type", None) == "mrope", "works", "refused",
            "it does not cut such positions by sample: leave out --position-embedding-type mrope, or "
            f"{_PLAIN} and with a script for such models"),
    Feature("legacy layers", ("--use-legacy-models",), _any("use_legacy_models"), "works", "refused",
            "layers are those of megatron.core: leave it out"),
    Feature("images that a model distils from itself (DINO)", ("--vision-pretraining", "--vision-pretraining-type"),
            _distils_images, "works", "refused",
            f"Megatron's own step updates the teacher, which --elastic replaces: {_PLAIN}, with a script for such "
            "models"),
    Feature("layers of different shapes", ("--heterogeneous-layers-config-path",),
            _any("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"), "works", "works",
            "a tensor-parallel group that loses a rank does not compute until it is whole"),
    Feature("torch FSDP2", ("--use-torch-fsdp2",), _any("use_torch_fsdp2"), "refused", "refused",
            "it shards parameters in its own way: use --use-distributed-optimizer"),
    Feature("Megatron FSDP", ("--use-megatron-fsdp", "--data-parallel-sharding-strategy"),
            _any("use_megatron_fsdp"), "refused", "refused",
            "it shards parameters in its own way: use --use-distributed-optimizer"),
    Feature("FP8", ("--fp8-format", *flag_table.FP8),
            lambda args: _any("fp8")(args) and _other_than("fp8_recipe", "custom")(args),
            "refused", "works", "in dense layers of Transformer Engine; with --fp8-recipe delayed scales change once a "
            "step; of the recipes delayed alone was run on a GPU"),
    Feature("FP8 by a quantizer of one's own", ("--fp8-quantizer-factory",),
            lambda args: _any("fp8")(args) and not _other_than("fp8_recipe", "custom")(args),
            "refused", "refused", "it may keep what no other rank knows: use --fp8-recipe delayed, tensorwise, "
            "blockwise or mxfp8"),
    Feature("FP4", ("--fp4-format", "--fp4-param-gather"), _any("fp4", "fp4_param_gather"), "refused", "refused",
            f"needs Transformer Engine on a GPU: use --bf16, or {_PLAIN}"),
    Feature("types by module", ("--te-precision-config-file",), _any("te_precision_config_file"), "refused",
            "refused", f"needs Transformer Engine on a GPU: use --fp8-format or --bf16, or {_PLAIN}"),
    Feature("layers of Kitchen", ("--kitchen-config-file", "--kitchen-recipe-number"), _kitchen, "refused", "refused",
            f"such layers were never run: use --fp8-format or --bf16, or {_PLAIN}"),
    Feature("kernels that do not depend on the batch", ("--batch-invariant-mode",), _any("batch_invariant_mode"),
            "refused", "refused", f"needs flash attention on a GPU: {_GPU}, {_PLAIN}"),
    Feature("random numbers of inference", ("--inference-rng-tracker",), _any("inference_rng_tracker"), "works",
            "refused", "on a GPU ranks of a tensor-parallel group would begin with equal weights: leave it out"),
    Feature("CUDA graphs", ("--cuda-graph-impl", "--enable-cuda-graph", "--external-cuda-graph"),
            lambda args: _any("enable_cuda_graph", "external_cuda_graph")(args)
            or _other_than("cuda_graph_impl", "none", None)(args), "substituted", "refused",
            f"a captured graph cannot follow when shapes and groups change: leave it out, or {_PLAIN}"),
    Feature("batch-size ramp-up", ("--rampup-batch-size", "--step-batch-size-schedule"),
            _any("rampup_batch_size", "step_batch_size_schedule"), "works", "works",
            "plans follow the number of samples; from Megatron 0.18 on by --step-batch-size-schedule, since it ignores "
            "--rampup-batch-size then"),
    Feature("Lion", ("--lion-beta1", "--lion-beta2"),
            lambda args: getattr(args, "optimizer", None) == "lion", "works", "works",
            "of Megatron 0.18 and later, which takes --adam-beta1 and --adam-beta2 for it; with --elastic no package "
            "emerging-optimizers is needed"),
    Feature("SOAP, and Muon with an adaptive step", ("--optimizer",), _other_than("optimizer", *STEPPED),
            "works", "refused", f"owners do not step it: use adam, lion, muon or sgd, or {_PLAIN}"),
    Feature("learning rates by width (muP)", ("--use-mup", *flag_table.MUP), _any("use_mup"), "works", "works", ""),
    Feature("clipped or logged attention logits", ("--qk-clip", "--qk-clip-alpha", "--qk-clip-threshold",
                                                   "--log-max-attention-logit"),
            _any("qk_clip", "log_max_attention_logit"), "refused", "refused",
            f"they are read and clipped in Megatron's own step, which --elastic replaces: {_GPU}, {_PLAIN}"),
    Feature("Muon", ("--muon-tp-mode", "--muon-scalar-optimizer"),
            uses_muon, "works", "works",
            "that of Megatron 0.17; with --elastic copies receive state, tensor-parallel parts are stepped blockwise, "
            "and no package emerging-optimizers is needed"),
    Feature("low-precision optimizer state", ("--use-precision-aware-optimizer", "--main-params-dtype",
                                              "--main-grads-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype"),
            _any("use_precision_aware_optimizer"), "refused", "works",
            "with --elastic moments in bf16 or fp32, in memory for fp32; gradients and masters are fp32"),
    Feature("checkpoints of FSDP and older formats", ("--ckpt-format",),
            _other_than("ckpt_format", "torch_dist", "torch"), "works", "refused", "use --ckpt-format torch_dist"),
    Feature("conversion of a checkpoint's format", ("--ckpt-convert-format", "--ckpt-convert-save",
                                                    "--ckpt-convert-update-legacy-dist-opt-format"),
            _any("ckpt_convert_format", "ckpt_convert_update_legacy_dist_opt_format"), "works", "refused",
            "convert the checkpoint first, without --elastic"),
    Feature("gradients in files", ("--save-wgrads-interval", "--save-dgrads-interval"),
            _any("save_wgrads_interval", "save_dgrads_interval"), "works", "refused",
            f"Megatron's own step writes them, which --elastic replaces: {_PLAIN}"),
    Feature("node-local checkpoints", ("--non-persistent-ckpt-type",),
            lambda args: getattr(args, "non_persistent_ckpt_type", None) == "local", "works", "refused",
            "copies in memory replace them (--elastic-mirrors): leave it out"),
    Feature("other data orders", ("--dataloader-type",),
            lambda args: getattr(args, "dataloader_type", None) in ("external", "batch"), "works", "refused",
            "any rank must be able to read any sample by its number: use --dataloader-type single or cyclic"),
    Feature("filling in the middle", ("--fim-data",), _any("fim_data"), "works", "refused",
            "the cut of a sample depends on those read before, and a step may be read again: prepare samples ahead"),
    Feature("skipped iterations", ("--iterations-to-skip", "--result-rejected-tracker-filename"),
            _any("iterations_to_skip", "result_rejected_tracker_filename"), "works", "works",
            "with --elastic every rank must find the same iterations in the tracker file, to which no rank adds"),
    Feature("several or full validation sets", ("--full-validation", "--multiple-validation-sets"),
            _any("full_validation", "multiple_validation_sets"), "works", "works",
            "with --elastic passes as Megatron 0.17 counts them, and a test set in --eval-iters batches"),
    Feature("ranks that exchange nothing", ("--fake-process-group",), _any("fake_process_group"), "works", "refused",
            f"a job for measurements of one rank: {_PLAIN}"),
    Feature("other rank orders", ("--use-tp-pp-dp-mapping",), _any("use_tp_pp_dp_mapping"), "works", "works",
            "ranks are ordered tensor, pipeline, data"),
    Feature("replicas that start unequal", ("--data-parallel-random-init",), _any("data_parallel_random_init"),
            "works", "refused", "all replicas of a layer must start equal: leave it out"),
    Feature("saved activations spread over ranks", ("--distribute-saved-activations",),
            _any("distribute_saved_activations"), "works", "works", "kept whole in groups that are not the launch's"),
    Feature("another fault-tolerance layer", ("--inprocess-restart", "--enable-ft-package", "--adlr-autoresume"),
            _any("inprocess_restart", "enable_ft_package", "adlr_autoresume"), "works", "refused",
            "two layers would both restart ranks: leave it out"),
    Feature("fine-tuning with packed sequences", ("--sft",), _any("sft"), "works", "works",
            "on Megatron's own layers with a mask; a row stays on one rank"),
    Feature("reinforcement learning", ("--perform-rl-step", "--rl-use-sequence-packing"),
            _any("perform_rl_step", "rl_use_sequence_packing"), "works", "refused",
            f"its samples are made while it trains, not read by number: {_PLAIN}"),
    Feature("phases of the data", ("--phase-transition-iterations",), _any("phase_transition_iterations"), "works",
            "refused", f"samples are numbered from the begin of the run, not of a phase: {_PLAIN}"),
    Feature("settings from a YAML file", ("--yaml-cfg",), _any("yaml_cfg"), "works", "works",
            "with --elastic the command line has precedence, and a file may leave settings out"),
)
# fmt: on
"""Features in the order of the documentation."""
