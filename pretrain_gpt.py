"""Pretrain a GPT with Megatron-LM's own loop; with ``--elastic`` the job survives the loss of workers.

    torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 ... --mock-data
    python -m megatron.elastic.launch --nproc-per-node 4 pretrain_gpt.py --elastic ...

The script provides model, batch, loss and datasets, as usual with Megatron-LM. Flags, loop,
logging and checkpoints are ``megatron.training``'s. The first import also makes it run
without a GPU; the same import makes any other Megatron-LM script elastic.
"""

from __future__ import annotations

import megatron.elastic.adaptor  # noqa: F401  # first: before anything of Megatron is imported

# isort: split

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers, get_tokenizer, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split

from megatron.elastic.mcore.args.bad_input import BadInput, translated
from megatron.elastic.mcore.args.preflight import check_tokens, check_validation, sequences_per_dataset
from megatron.elastic.mcore.patching.compat import batch_on_this_rank, packed_batch_on_this_rank, predicts_here, run

Batch = tuple[torch.Tensor | None, ...]
SPIKE = 10
"""Megatron's factor over the usual loss, from which on ``--check-for-spiky-loss`` is concerned."""
FIELDS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def check_model(args: Namespace) -> None:
    """Raise :class:`BadInput` for flags of models that this script does not build."""
    if args.hybrid_layer_pattern is not None:
        raise BadInput("--hybrid-layer-pattern: this script builds GPT models only; leave it out")
    if args.position_embedding_type == "mrope":
        raise BadInput("--position-embedding-type mrope: a token of this script has one position, not three: use rope")
    if getattr(args, "vision_pretraining", False) and args.vision_pretraining_type == "dino":
        raise BadInput("--vision-pretraining-type dino: this script builds GPT models only; leave it out")


def layer_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    """Return the modules of a layer: Transformer Engine's if requested, else megatron.core's own."""
    transformer_engine = args.transformer_impl == "transformer_engine"
    if args.spec is not None:
        return import_module(args.spec)
    if getattr(config, "heterogeneous_block_specs", False):
        return get_gpt_heterogeneous_layer_spec(config, transformer_engine, vp_stage=vp_stage)
    if args.num_experts:
        return get_gpt_decoder_block_spec(
            config, transformer_engine, normalization=args.normalization, qk_l2_norm=args.qk_l2_norm, vp_stage=vp_stage
        )
    shared = {
        "num_experts": args.num_experts,
        "moe_grouped_gemm": args.moe_grouped_gemm,
        "qk_layernorm": args.qk_layernorm,
        "multi_latent_attention": args.multi_latent_attention,
        "qk_l2_norm": args.qk_l2_norm,
    }
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(**shared)
    return get_gpt_layer_local_spec(**shared, normalization=args.normalization)


def last_layer_spec(args: Namespace, config: Any, spec: Any, vp_stage: int | None) -> Any:
    """Return the modules of the model's last layer, also for a stage that has none. ``spec``: of this stage."""
    if not args.num_experts or args.spec is not None:
        return spec
    layers = get_gpt_decoder_layer_specs(
        config,
        args.transformer_impl == "transformer_engine",
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return layers[-1]


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Return this rank's part of the model. ``pre_process``: with the embedding; ``post_process``: with the head."""
    args = get_args()
    check_model(args)
    config = config or core_transformer_config_from_args(args)
    spec = layer_spec(args, config, vp_stage)
    mtp_spec = None
    if args.mtp_num_layers is not None:
        transformer_engine = args.transformer_impl == "transformer_engine"
        last = last_layer_spec(args, config, spec, vp_stage)
        mtp_spec = get_gpt_mtp_block_spec(config, last, use_transformer_engine=transformer_engine, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=mtp_spec,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def holds_mtp(vp_stage: int | None) -> bool:
    """Return whether this rank holds layers that predict further tokens: these read tokens, like the first stage."""
    args = get_args()
    if args.mtp_num_layers is None:
        return False
    return predicts_here(core_transformer_config_from_args(args), vp_stage)


def get_batch(data_iterator: Iterator[Any] | None, vp_stage: int | None = None) -> tuple[Batch, PackedSeqParams | None]:
    """Return (tokens, labels, loss_mask, attention_mask, position_ids), each [micro-batch, sequence].

    All are None in the middle of a pipeline. With them, where the sequences of a packed row end (``--sft``).
    """
    first = mpu.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    last = mpu.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    predicts_ahead = holds_mtp(vp_stage)
    packed = None
    if get_args().sft:
        batch, packed = packed_batch_on_this_rank(data_iterator, first or last)
    elif first or last or predicts_ahead:
        batch = batch_on_this_rank(data_iterator, first, last, predicts_ahead)
    else:
        batch = {}
    return tuple(batch.get(name) for name in FIELDS), packed


def check_loss(total: torch.Tensor) -> None:
    """Have Megatron compute a step again whose loss is not finite (it then ends), or unexpectedly large."""
    args, machine = get_args(), get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        machine.validate_result(total, torch.isnan, "the loss of a micro-batch is not a number")
        machine.validate_result(total, torch.isinf, "the loss of a micro-batch is infinite")
    if args.check_for_spiky_loss:
        large = partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss")
        machine.validate_result(total, large, "the loss of a micro-batch has a spike", fatal=False)


def loss_func(
    loss_mask: torch.Tensor | None, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return the sum of the unmasked token losses, their count, and the values to log: ``[sum, count]``.

    ``loss_mask``, ``output``: [micro-batch, sequence]. Megatron divides by the count,
    per micro-batch or (``--calculate-per-token-loss``) once over the global batch.
    """
    assert loss_mask is not None, "the last stage reads the mask"
    losses = output.view(-1).float()
    mask = loss_mask.view(-1).float()
    total = torch.sum(losses * mask)
    tokens = mask.sum().detach().to(torch.int)
    report = torch.cat([total.detach().clone().view(1), tokens.view(1)])
    if not get_args().elastic:  # its engine looks at the sums of all ranks
        check_loss(total)
    return total, tokens, {"lm loss": report}


def forward_step(data_iterator: Iterator[Any] | None, model: GPTModel) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch forward; return (per-token losses or activations, loss function)."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    (tokens, labels, loss_mask, attention_mask, position_ids), packed = get_batch(data_iterator, vp_stage)
    timers("batch-generator").stop()
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, packed_seq_params=packed)
    return output, partial(loss_func, loss_mask)


def reads_data(vp_stage: int | None = None) -> bool:
    """Return whether this rank feeds a pipeline: first or last stage, first of its tensor-parallel group.

    Every stage needs the ends of packed sequences.
    """
    ignore = vp_stage is None
    ends = mpu.is_pipeline_first_stage(ignore_virtual=ignore, vp_stage=vp_stage) or mpu.is_pipeline_last_stage(
        ignore_virtual=ignore, vp_stage=vp_stage
    )
    return bool((ends or get_args().sft or holds_mtp(vp_stage)) and mpu.get_tensor_model_parallel_rank() == 0)


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Return the configuration of Megatron's dataset builder from Megatron's flags."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    kind = partial(GPTFIMDatasetConfig, **cut_of_samples(args)) if args.fim_data else GPTDatasetConfig
    return kind(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequences_per_dataset=sequences_per_dataset(args),
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        context_parallel_size=args.context_parallel_size,
    )


def cut_of_samples(args: Namespace) -> dict[str, Any]:
    """Return the settings of ``--fim-data``: samples are cut in three, and the middle is put last."""
    tokens = ("prefix", "middle", "suffix", "pad", "eod")
    return {
        "fim_rate": args.fim_rate,
        "fim_spm_rate": args.fim_spm_rate,
        "fim_extra_tokens": {name: getattr(args, f"fim_{name}_token") for name in tokens},
        "fim_split_sample": args.fim_split_sample,
        "fim_fragment_rate": args.fim_fragment_rate,
        "fim_no_prefix": args.fim_no_prefix,
    }


def datasets_provider(sample_counts: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Return train, validation and test datasets of at least ``sample_counts`` samples each."""
    args = get_args()
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    check_tokens(args, args.padded_vocab_size)
    of_tokens = MockGPTDataset if args.mock_data else GPTFIMDataset if args.fim_data else GPTDataset
    kind = SFTDataset if args.sft else of_tokens
    with translated():
        config = dataset_config(args)
    builder = BlendedMegatronDatasetBuilder(kind, sample_counts, partial(reads_data, vp_stage), config)
    train, valid, test = builder.build()
    check_validation(args, train, valid)
    print_rank_0("> finished creating GPT datasets ...")
    return train, valid, test


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank builds: Megatron's own convention


def main() -> None:
    """Run Megatron-LM's loop with the functions above."""
    run(datasets_provider, model_provider, forward_step, {"tokenizer_type": "GPT2BPETokenizer"})


if __name__ == "__main__":
    main()
