"""One line for a checkpoint that does not fit the flags: which of them differ, in place of Megatron's traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import StackSummary, extract_tb
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.args.folders import TRACKER

__all__ = ["differing_flags", "other_model_named"]

_OF_A_MODEL = {
    "num_layers": "",
    "hidden_size": "",
    "ffn_hidden_size": "",
    "num_attention_heads": "",
    "group_query_attention": "",
    "kv_channels": "",
    "max_position_embeddings": "",
    "position_embedding_type": "",
    "padded_vocab_size": "padded --vocab-size",
    "add_bias_linear": "biases (--disable-bias-linear)",
    "add_qkv_bias": "",
    "swiglu": "",
    "normalization": "",
    "qk_layernorm": "",
    "untie_embeddings_and_output_weights": "",
    "multi_latent_attention": "",
    "mtp_num_layers": "",
    "num_experts": "",
    "moe_ffn_hidden_size": "",
    "moe_layer_freq": "",
    "moe_shared_expert_intermediate_size": "",
    "optimizer": "",
    "bf16": "",
    "fp16": "",
}
"""Argument by which models or their optimizer state differ → its words in a message; by default its flag."""
_SHOWN = 4
"""Largest number of differences in a message."""
_LENGTH = 160
"""Largest length of Megatron's own text in a message."""


@contextmanager
def other_model_named(flag: str, folder: str, args: Any) -> Iterator[None]:
    """Turn Megatron's errors for a checkpoint of another model or schedule, in ``folder``, into :class:`BadInput`."""
    try:
        yield
    except (CheckpointingException, CheckpointException, KeyError) as error:
        failures = (
            error.failures if isinstance(error, CheckpointException) else {0: (error, extract_tb(error.__traceback__))}
        )
        causes = [cause for cause, _ in failures.values()]
        if not all(_is_of_another_model(*failure) for failure in failures.values()):
            raise
        if _missing(causes[0]) in ("optimizer", "opt_param_scheduler"):
            raise BadInput(
                f"{flag} {folder}: the checkpoint has no optimizer state (--no-save-optim): add --no-load-optim or "
                "--finetune"
            ) from error
        why = ", ".join(differing_flags(folder, args)) or " ".join(str(causes[0]).split())[:_LENGTH]
        raise BadInput(
            f"{flag} {folder}: the checkpoint is of another model ({why}): use its flags, or choose another folder; "
            "where only optimizer state differs, add --no-load-optim"
        ) from error
    except AssertionError as error:
        if not str(error).startswith("OptimizerParamScheduler"):
            raise
        raise BadInput(
            f"{flag} {folder}: {' '.join(str(error).split())}: add --override-opt_param-scheduler to use the flags, or "
            "--use-checkpoint-opt_param-scheduler to use the checkpoint's"
        ) from error


def differing_flags(folder: str, args: Any) -> list[str]:
    """Return how the flags of the checkpoint in ``folder`` that Megatron loads differ from ``args``."""
    saved = _saved_arguments(folder, args)
    found = []
    for name, words in _OF_A_MODEL.items():
        there, here = getattr(saved, name, None), getattr(args, name, None)
        if hasattr(saved, name) and there != here:
            found.append(f"{words or '--' + name.replace('_', '-')}: {there} there, {here} here")
    more = [f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return found[:_SHOWN] + more


def _saved_arguments(folder: str, args: Any) -> Any:
    """Return the arguments in the checkpoint; ``None`` if there are none that can be read."""
    try:
        named = (Path(folder) / TRACKER).read_text(encoding="utf-8").strip()
        step = args.ckpt_step or (int(named) if named.isdecimal() else 0)
        state = dist_checkpointing.load_common_state_dict(str(Path(folder) / (f"iter_{step:07d}" if step else named)))
    except (OSError, CheckpointingException):
        return None
    return state.get("args")


def _missing(error: BaseException) -> str:
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else ""


def _is_of_another_model(error: BaseException, trace: StackSummary) -> bool:
    """Return whether a reader of checkpoints raised ``error``; a KeyError of other code is none."""
    if isinstance(error, CheckpointingException):
        return True
    return isinstance(error, KeyError) and bool(trace) and "checkpoint" in trace[-1].filename
