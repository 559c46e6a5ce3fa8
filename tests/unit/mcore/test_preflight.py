"""Sizes and data are checked before anything is built; each fault is one line naming flag and fix."""

from __future__ import annotations

import json
import struct
from argparse import Namespace
from pathlib import Path
from traceback import StackSummary
from typing import Any

import numpy
import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megatron.elastic.comm.errors import PeerLost
from megatron.elastic.mcore.args.bad_input import (
    BadInput,
    explain_assertion,
    translated,
    unreadable_named,
    unwritable_cache_named,
)
from megatron.elastic.mcore.args.preflight import (
    check_data,
    check_index,
    check_sizes,
    data_prefixes,
    sequences_per_dataset,
)


def sizes(**given: Any) -> Namespace:
    base = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
        "world_size": 8,
        "num_attention_heads": 8,
        "hidden_size": 64,
        "kv_channels": None,
        "num_layers": 4,
        "group_query_attention": False,
        "num_query_groups": 1,
        "sequence_parallel": False,
        "seq_length": 32,
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "rampup_batch_size": None,
        "skip_train": False,
        "full_validation": False,
        "multiple_validation_sets": False,
        "train_iters": 10,
        "train_samples": None,
        "eval_interval": 100,
    }
    return Namespace(**{**base, **given})


def data(**given: Any) -> Namespace:
    return Namespace(**{"mock_data": False, **given})


def one_line(caught: pytest.ExceptionInfo[BadInput], *words: str) -> None:
    text = str(caught.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_sizes_that_fit_pass() -> None:
    check_sizes(sizes())
    check_sizes(sizes(num_layers=5, decoder_first_pipeline_num_layers=2))
    check_sizes(sizes(global_batch_size=None))
    check_sizes(sizes(lr_warmup_iters=9, lr=1e-4, min_lr=1e-4, lr_decay_style="WSD", lr_wsd_decay_iters=3))
    check_sizes(sizes(lr_warmup_iters=0, lr_warmup_fraction=0.5, lr_decay_iters=20))
    check_sizes(sizes(full_validation=True, multiple_validation_sets=True, eval_interval=None))
    check_sizes(sizes(train_iters=None, train_samples=160))
    check_sizes(sizes(train_iters=None, eval_interval=None, skip_train=True))
    check_sizes(sizes(num_virtual_stages_per_pipeline_rank=2))
    check_sizes(sizes(rampup_batch_size=["4", "4", "100"]))
    check_sizes(sizes(rampup_batch_size=["3", "1", "100"], decrease_batch_size_if_needed=True))
    check_sizes(sizes(global_batch_size=None, step_batch_size_schedule="0:8, 1K:16 2.5M:1K"))
    check_sizes(sizes(num_virtual_stages_per_pipeline_rank=1, pipeline_model_parallel_size=1))
    check_sizes(sizes(num_virtual_stages_per_pipeline_rank=2, num_layers=5, decoder_first_pipeline_num_layers=2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train_iters": None}, ("--train-iters or --train-samples",)),
        ({"eval_interval": None}, ("--eval-interval", "--eval-iters 0")),
        ({"lr_warmup_iters": 10}, ("--lr-warmup-iters 10", "less than --train-iters 10")),
        ({"lr_warmup_iters": 5, "lr_decay_iters": 5}, ("--lr-warmup-iters 5", "less than --lr-decay-iters 5")),
        (
            {"train_iters": None, "train_samples": 160, "lr_warmup_samples": 200},
            ("--lr-warmup-samples 200", "less than --train-samples 160"),
        ),
        ({"lr": 1e-4, "min_lr": 1e-3}, ("--min-lr 0.001 is above --lr 0.0001",)),
        ({"lr": 1e-4, "lr_warmup_init": 1e-3}, ("--lr-warmup-init 0.001 is above --lr 0.0001",)),
        ({"lr_decay_style": "WSD"}, ("--lr-decay-style WSD", "--lr-wsd-decay-iters")),
        ({"multiple_validation_sets": True}, ("--multiple-validation-sets", "add --full-validation")),
        ({"world_size": 2}, ("too few ranks", "--tensor-model-parallel-size 2", "--nproc-per-node")),
        ({"world_size": 6}, ("6 ranks", "--pipeline-model-parallel-size 2")),
        ({"num_attention_heads": 7}, ("--num-attention-heads 7", "--tensor-model-parallel-size 2")),
        ({"hidden_size": 60}, ("--hidden-size 60", "--num-attention-heads 8")),
        ({"num_layers": 5}, ("--num-layers 5", "--pipeline-model-parallel-size 2")),
        ({"sequence_parallel": True, "seq_length": 31}, ("--seq-length 31", "--tensor-model-parallel-size 2")),
        ({"group_query_attention": True, "num_query_groups": 3}, ("--num-query-groups 3",)),
        ({"global_batch_size": 18}, ("--global-batch-size 18", "--micro-batch-size 2", "2 data-parallel")),
        ({"rampup_batch_size": ["8", "8"]}, ("--rampup-batch-size 8 8", "three numbers")),
        ({"rampup_batch_size": [6, 5, 9]}, ("--rampup-batch-size 6 5 9", "start batch size 6", "--micro-batch-size 2")),
        ({"rampup_batch_size": [16, 4, 9]}, ("--rampup-batch-size 16 4 9", "--global-batch-size 16", "smaller start")),
        ({"rampup_batch_size": [4, 8, 9]}, ("--rampup-batch-size 4 8 9", "whole number of increments")),
        ({"step_batch_size_schedule": "0:8 1K:18"}, ("--step-batch-size-schedule '0:8 1K:18': 18", "--micro-batch")),
        ({"step_batch_size_schedule": "0:8 16"}, ("--step-batch-size-schedule '0:8 16': 16", "250B:1536")),
        (
            {"num_virtual_stages_per_pipeline_rank": 2, "rampup_batch_size": [8, 4, 9]},
            ("increment 4 is 1 micro-batches", "--pipeline-model-parallel-size 2"),
        ),
        (
            {"num_virtual_stages_per_pipeline_rank": 3},
            ("--num-layers 4", "--pipeline-model-parallel-size 2", "--num-virtual-stages-per-pipeline-rank 3"),
        ),
        (
            {"num_layers_per_virtual_pipeline_stage": 4},
            ("--num-layers 4", "--pipeline-model-parallel-size 2", "--num-layers-per-virtual-pipeline-stage 4"),
        ),
        (
            {"num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 12},
            ("--global-batch-size 12", "3 micro-batches", "--pipeline-model-parallel-size 2", "leave"),
        ),
        (
            {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_model_parallel_size": 1},
            ("--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-size 2 or more"),
        ),
    ],
)
def test_sizes_that_do_not_divide_name_both_flags(given: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(BadInput) as caught:
        check_sizes(sizes(**given))
    one_line(caught, *words)


def write_dataset(prefix: Path, lengths: list[int], code: int = 8, item_bytes: int = 2) -> None:
    """A dataset in Megatron's .bin/.idx layout, written here from the format's description."""
    prefix.with_suffix(".bin").write_bytes(b"\0" * (sum(lengths) * item_bytes))
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    pointers = numpy.cumsum([0, *lengths[:-1]], dtype=numpy.int64) * item_bytes
    documents = numpy.arange(len(lengths) + 1, dtype=numpy.int64)
    body = numpy.array(lengths, dtype=numpy.int32).tobytes() + pointers.tobytes() + documents.tobytes()
    prefix.with_suffix(".idx").write_bytes(header + body)


def test_a_good_dataset_passes(tmp_path: Path) -> None:
    write_dataset(tmp_path / "text", [5, 9, 2])
    check_index("--data-path", str(tmp_path / "text"))
    check_data(data(data_path=["0.3", str(tmp_path / "text")]))


def test_a_missing_dataset_names_the_flag_and_the_tool(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        check_data(data(data_path=[str(tmp_path / "nothing")]))
    one_line(caught, "--data-path", "nothing.idx", "tools/preprocess_data.py")


def test_a_share_without_documents_is_refused(tmp_path: Path) -> None:
    """Megatron's builder does not come back from one."""
    write_dataset(tmp_path / "text", [8] * 40)
    path = str(tmp_path / "text")
    for split in ("90,5,5", "97,3,0", "100,0,0", "1"):
        check_data(data(data_path=[path], split=split))
    for split, share in (("98,1,1", "test"), ("999,1,0", "validation")):
        with pytest.raises(BadInput) as caught:
            check_data(data(data_path=["1", path], split=split))
        one_line(caught, f"--split {split}", "none of the 40 documents", f"for {share}", "give it 0")
    with pytest.raises(BadInput) as caught:
        check_data(data(data_path=[path], split="none"))
    one_line(caught, "--split none", "949,50,1")
    elastic = {"elastic": True, "skip_train": False, "full_validation": False}
    check_data(data(data_path=[path], split="1,0,0", eval_iters=0, **elastic))
    with pytest.raises(BadInput) as caught:
        check_data(data(data_path=[path], split="1,0,0", eval_iters=2, **elastic))
    one_line(caught, "--split 1,0,0 leaves nothing for validation", "--eval-iters 2")
    write_dataset(tmp_path / "empty", [0])
    with pytest.raises(BadInput) as caught:
        check_data(data(valid_data_path=[str(tmp_path / "empty")]))
    one_line(caught, "--valid-data-path", "no text in it")


def cut_data(prefix: Path) -> None:
    path = prefix.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-3])


def cut_index(prefix: Path) -> None:
    path = prefix.with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:-5])


def overwrite_header(prefix: Path) -> None:
    path = prefix.with_suffix(".idx")
    path.write_bytes(b"not a Megatron index" + path.read_bytes()[20:])


def empty_index(prefix: Path) -> None:
    prefix.with_suffix(".idx").write_bytes(b"")


@pytest.mark.parametrize("damage", [cut_data, cut_index, overwrite_header, empty_index])
def test_a_damaged_dataset_is_found_before_training(tmp_path: Path, damage: Any) -> None:
    write_dataset(tmp_path / "text", [5, 9, 2])
    damage(tmp_path / "text")
    with pytest.raises(BadInput) as caught:
        check_index("--train-data-path", str(tmp_path / "text"))
    one_line(caught, "--train-data-path", "preprocess the data again")


def test_blends_lists_and_per_split_files_are_read(tmp_path: Path) -> None:
    listed = tmp_path / "blend.txt"
    listed.write_text("0.4 /a/one 0.6 /a/two\n")
    splits = tmp_path / "splits.json"
    splits.write_text(json.dumps({"train": ["1", "/b/train"], "valid": "/b/valid", "test": ["/b/test"]}))
    args = data(data_path=["1", "/c/x", "2", "/c/y"], data_args_path=str(listed), per_split_data_args_path=str(splits))
    assert [prefix for _, prefix in data_prefixes(args)] == [
        "/c/x",
        "/c/y",
        "/a/one",
        "/a/two",
        "/b/train",
        "/b/valid",
        "/b/test",
    ]


def test_a_list_of_datasets_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "splits.json"
    broken.write_text("{not json")
    for attribute, path in (("data_args_path", tmp_path / "gone"), ("per_split_data_args_path", broken)):
        with pytest.raises(BadInput) as caught:
            data_prefixes(data(**{attribute: str(path)}))
        one_line(caught, "--" + attribute.replace("_", "-"))


def test_a_missing_vocabulary_names_its_flag(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        check_data(data(vocab_file=str(tmp_path / "vocab.json")))
    one_line(caught, "--vocab-file")


def test_an_assertion_with_text_becomes_that_text() -> None:
    with pytest.raises(BadInput, match="the text"):
        with translated():
            raise AssertionError("the   text")


def test_an_assertion_without_text_shows_what_was_asserted() -> None:
    left = 3
    try:
        assert left == 4
    except AssertionError as error:
        error.args = ()
        assert "left == 4" in explain_assertion(error)


def gathered(*errors: Exception) -> CheckpointException:
    """The error that torch raises on every rank over ``errors`` of some."""
    return CheckpointException("load", {rank: (error, StackSummary()) for rank, error in enumerate(errors)})


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file", "iter_0000077"),
        gathered(EOFError()),
        gathered(AssertionError("metadata is None"), EOFError()),
        RuntimeError("PytorchStreamReader failed reading zip archive"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_damaged_checkpoint_is_one_line(error: BaseException) -> None:
    with pytest.raises(BadInput) as caught, unreadable_named("--load", "/saved"):
        raise error
    one_line(caught, "--load /saved", "--ckpt-step")


@pytest.mark.parametrize("error", [PeerLost(1, "gone"), gathered(PeerLost(1, "gone")), RuntimeError("a bug")])
def test_what_is_no_fault_of_the_checkpoint_passes(error: BaseException) -> None:
    with pytest.raises(type(error)), unreadable_named("--load", "/saved"):
        raise error


def test_a_cache_of_the_data_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(BadInput) as caught, unwritable_cache_named("/full"):
        raise Exception("Failed to write dataset materials to the data cache directory.") from OSError(28, "no space")
    one_line(caught, "--data-cache-path /full", "no space", "free space")
    with pytest.raises(PeerLost), unwritable_cache_named("/full"):
        raise PeerLost(1, "gone") from OSError(104, "reset")


@pytest.mark.parametrize(
    ("text", "told"),
    [("[1]", "no attribute"), ("{", "Expecting"), ('{"words": [3]}', "of words"), ('{"other": [3, 4]}', "of words")],
)
def test_numbers_of_sequences_are_given_for_each_dataset(tmp_path: Path, text: str, told: str) -> None:
    listed = tmp_path / "counts.json"
    args = Namespace(per_dataset_sequences_path=str(listed), data_path=["0.5", "words"])
    with pytest.raises(BadInput, match=r"--per-dataset-sequences-path .*No such file"):
        sequences_per_dataset(args)
    listed.write_text(text)
    with pytest.raises(BadInput, match=rf"--per-dataset-sequences-path .*{told}"):
        sequences_per_dataset(args)
    listed.write_text('{"words": [3, 4]}')
    assert sequences_per_dataset(args) == {"words": [3, 4]}
