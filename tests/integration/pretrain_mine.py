"""A training script as people have it for Megatron-LM 0.17, which knows nothing of elasticity: nothing here imports it.

In the shape of Megatron-LM's own ``pretrain_gpt.py``, with what such scripts do on the way: batches
read by Megatron's helpers, time in a straggler detector, losses handed to the rerun state machine, an
argument of its own. Run by tests under ``launch --adapt``.
"""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import StragglerDetector, get_batch_on_this_cp_rank
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_batch_on_this_tp_rank

detector = StragglerDetector()


def add_my_arguments(parser):
    group = parser.add_argument_group("mine")
    group.add_argument("--greeting", default="hello")
    return parser


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    print_rank_0(f"{args.greeting}: building a model ...")
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        pg_collection=pg_collection,
    )


def get_batch(data_iterator):
    if not (mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()):
        return None, None, None, None, None
    batch = get_batch_on_this_cp_rank(get_batch_on_this_tp_rank(data_iterator))
    return tuple(batch[name] for name in ("tokens", "labels", "loss_mask", "attention_mask", "position_ids"))


def loss_func(loss_mask, output):
    mask = loss_mask.view(-1).float()
    total = torch.sum(output.view(-1).float() * mask)
    if get_args().check_for_nan_in_loss_and_grad:
        for wrong in (torch.isnan, torch.isinf):
            get_rerun_state_machine().validate_result(
                result=total, rejection_func=wrong, message=f"{wrong.__name__} of a local loss", fatal=True
            )
    count = mask.sum().clone().detach().to(torch.int)
    return total, count, {"lm loss": torch.cat([total.clone().detach().view(1), count.view(1)])}


def forward_step(data_iterator, model):
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with detector(bdata=True):
        tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator)
    timers("batch-generator").stop()
    with detector:
        output = model(tokens, position_ids, attention_mask, labels=labels)
    return output, partial(loss_func, loss_mask)


def datasets_provider(sample_counts):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    ends = mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
    reads = ends and mpu.get_tensor_model_parallel_rank() == 0
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sample_counts, lambda: reads, config).build()


if __name__ == "__main__":
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        extra_args_provider=add_my_arguments,
    )
