"""Script: write the settings that ``pretrain_gpt.py`` gives Megatron's datasets, and how it judges a loss."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pretrain_gpt as script

# isort: split
import torch
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine


def arguments(folder: Path, **given: Any) -> Namespace:
    """Megatron's arguments as far as data sets take them, each with a value of its own."""
    counts = folder / "counts.json"
    counts.write_text(json.dumps({"words": [4, 5]}))
    names = ("prefix", "middle", "suffix", "pad", "eod")
    base = {
        **{f"fim_{name}_token": name for name in names},
        **{"fim_data": False, "fim_rate": 0.25, "fim_spm_rate": 0.75, "fim_split_sample": "/"},
        **{"fim_fragment_rate": 0.5, "fim_no_prefix": "#", "seed": 7, "seq_length": 32, "split": None},
        **{"data_path": None, "data_args_path": None, "per_split_data_args_path": None, "valid_data_path": None},
        **{"train_data_path": ["words"], "test_data_path": None, "multiple_validation_sets": False},
        **{"full_validation": False, "num_dataset_builder_threads": 1, "data_cache_path": str(folder)},
        **{"mmap_bin_files": True, "reset_position_ids": False, "reset_attention_mask": False},
        **{"eod_mask_loss": False, "create_attention_mask_in_dataloader": True, "object_storage_cache_path": None},
        **{"mid_level_dataset_surplus": 0.005, "allow_ambiguous_pad_tokens": False, "data_parallel_size": 1},
        **{"tensor_model_parallel_size": 1, "sequence_parallel": False, "context_parallel_size": 1, "sft": False},
        **{"dataloader_fast_cache_load": True, "dataloader_defer_npy_index_mmap": True},
        **{"per_dataset_sequences_path": str(counts), "mock_data": False, "elastic": False},
        **{"check_for_nan_in_loss_and_grad": True, "check_for_spiky_loss": False},
    }
    return Namespace(**{**base, **given})


def settings(args: Namespace) -> dict[str, Any]:
    """Return what the script makes of some flags."""
    made = script.dataset_config(args)
    names = ["fast_cache_load", "defer_npy_index_mmap", "sequences_per_dataset", "fim_rate", "fim_spm_rate"]
    names += ["fim_extra_tokens", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix"]
    return {"kind": type(made).__name__, **{name: getattr(made, name) for name in names if hasattr(made, name)}}


def judged(args: Namespace, loss: float) -> str:
    """Return what the loss function raises for a loss, if anything."""
    vars(script)["get_args"] = lambda: args
    try:
        script.loss_func(torch.ones(1, 2), torch.full((1, 2), loss))
    except RuntimeError as error:
        return str(error)
    return ""


def main(out: Path) -> None:
    """Write all answers as JSON."""
    vars(script)["get_tokenizer"] = lambda: SimpleNamespace(vocab_size=100)
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    args = arguments(out.parent)
    elastic = arguments(out.parent, elastic=True)
    answers = {
        "tokens": settings(args),
        "cut": settings(arguments(out.parent, fim_data=True)),
        "losses": [judged(args, 1.0), judged(args, float("nan")), judged(args, float("inf"))],
        "with --elastic": judged(elastic, float("nan")),
    }
    out.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
