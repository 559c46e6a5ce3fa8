"""Functions of Megatron for training scripts, adapted to releases 0.17 to 0.19 by signature.

From 0.18 on, the script parses arguments, ``pretrain`` takes a container of
settings, and a batch is read before it is broadcast. Only names that changed are
here; a script for one release does not need this file.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core import utils as core_utils
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import get_args, training

__all__ = ["batch_on_this_rank", "packed_batch_on_this_rank", "predicts_here", "run"]

_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
_OTHER_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size")


def batch_on_this_rank(
    data_iterator: Iterator[Any] | None, first: bool, last: bool, predicts_ahead: bool
) -> Mapping[str, torch.Tensor | None]:
    """Return the next micro-batch, broadcast from the group's first rank and cut for context parallelism.

    Keys 'tokens', 'labels', 'loss_mask', 'attention_mask', 'position_ids', each
    [micro-batch, sequence] or ``None`` if this stage does not need it.
    """
    broadcast = getattr(core_utils, "get_batch_on_this_tp_rank", None)
    if broadcast is None:
        read_and_broadcast = importlib.import_module("megatron.training.utils").get_batch_on_this_tp_rank
        batch = read_and_broadcast(data_iterator, mtp_on_this_rank=predicts_ahead)
        return dict(core_utils.get_batch_on_this_cp_rank(batch))
    args, rank = get_args(), mpu.get_tensor_model_parallel_rank()
    known = {
        "batch": _read(data_iterator) if rank == 0 else {},
        "is_sft": False,
        "has_cu_seqlens": False,
        "is_hybrid_cp": False,
        "create_attention_mask_in_dataloader": args.create_attention_mask_in_dataloader,
        "broadcast_src_rank": mpu.get_tensor_model_parallel_src_rank(),
        "broadcast_group": mpu.get_tensor_model_parallel_group(),
        "cp_size": args.context_parallel_size,
        "tp_rank": rank,
        "micro_batch_size": args.micro_batch_size,
        "seq_length": args.seq_length,
        "mtp_on_this_rank": predicts_ahead,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "is_pipeline_first_stage": first,
        "is_pipeline_last_stage": last,
    }
    batch = broadcast(**_accepted(broadcast, known))
    cut = core_utils.get_batch_on_this_cp_rank
    return dict(cut(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()))


def packed_batch_on_this_rank(
    data_iterator: Iterator[Any] | None, whole: bool
) -> tuple[Mapping[str, torch.Tensor | None], PackedSeqParams]:
    """Return the next row of packed sequences, broadcast from the group's first rank, and where these end.

    Tensors are [1, sequence]; ``whole`` False: ``None``, for a stage that needs the ends alone. Each stage needs these,
    but Megatron itself does not send them in every stage (0.17.1).
    """
    args, device = get_args(), torch.cuda.current_device()
    group, source = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_src_rank()
    reads = mpu.get_tensor_model_parallel_rank() == 0
    row: Mapping[str, torch.Tensor] = {}
    if reads:
        assert data_iterator is not None, "this rank feeds its tensor-parallel group"
        row = next(data_iterator)

    def sent(values: torch.Tensor | None, count: int, kind: torch.dtype) -> torch.Tensor:
        empty = torch.empty((1, count), dtype=kind, device=device)
        found = empty if values is None else empty.copy_(values.reshape(1, count))
        dist.broadcast(found, source, group=group)
        return found

    ends = row.get("cu_seqlens")
    found = sent(None if ends is None else torch.tensor([ends.numel(), int(row["max_seqlen"])]), 2, torch.int64)
    count, longest = found[0].tolist()
    ends = sent(ends, count, torch.int32)[0]
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    if not whole:
        return dict.fromkeys(_KEYS), packed
    kinds = {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32, "position_ids": torch.int64}
    batch = {name: sent(row.get(name), args.seq_length, kind) for name, kind in kinds.items()}
    return {**batch, "attention_mask": None}, packed


def predicts_here(config: Any, vp_stage: int | None) -> bool:
    """Return whether the present stage and chunk have layers that predict further tokens."""
    known = {
        "config": config,
        "layout": getattr(config, "pipeline_model_parallel_layout", None),
        "mtp_num_layers": config.mtp_num_layers,
        "ignore_virtual": False,
        "vp_stage": vp_stage,
    }
    return bool(mtp_on_this_rank(**_accepted(mtp_on_this_rank, known)))


def _read(data_iterator: Iterator[Any] | None) -> dict[str, torch.Tensor | None]:
    assert data_iterator is not None, "this rank feeds its tensor-parallel group"
    data = next(data_iterator)
    device = torch.cuda.current_device()
    present = {key: data[key].to(device, non_blocking=True) for key in _KEYS if key in data}
    return {**dict.fromkeys((*_KEYS, *_OTHER_KEYS)), **present}


def _accepted(function: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``known`` that are parameters of ``function``."""
    return {name: known[name] for name in inspect.signature(function).parameters if name in known}


def run(
    datasets_provider: Callable[..., Any],
    model_provider: Callable[..., Any],
    forward_step: Callable[..., Any],
    defaults: Mapping[str, Any],
) -> None:
    """Run Megatron-LM's ``pretrain`` with a script's functions; ``defaults``: defaults of further arguments."""
    known: dict[str, Any] = {
        "train_valid_test_dataset_provider": datasets_provider,
        "model_provider": model_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
        "args_defaults": dict(defaults),
    }
    if "cfg_container" in inspect.signature(training.pretrain).parameters:
        arguments = importlib.import_module("megatron.training.arguments")
        settings = importlib.import_module("megatron.training.argument_utils")
        parsed = arguments.parse_and_validate_args(args_defaults=dict(defaults))
        known["cfg_container"] = settings.pretrain_cfg_container_from_args(parsed)
    training.pretrain(**_accepted(training.pretrain, known))
