"""Checks of sizes and data before the model is built: one line that names the flag and the fix.

Megatron finds the same faults later, on some ranks only, as assertions inside
constructors. Here every rank makes the same checks before a group or a file is opened.
The data check reads headers only: the index (``.idx``) begins with a magic, a
version, a type code and two counts, and fixes the size that ``.bin`` must have.
"""

from __future__ import annotations

import json
import os
import re
import struct
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.elastic.mcore.args.bad_input import BadInput, Faults, translated
from megatron.elastic.mcore.args.conversations import conversation_faults

__all__ = [
    "batch_sizes",
    "check_data",
    "check_index",
    "check_shared_memory",
    "check_sizes",
    "check_sources",
    "check_tokens",
    "check_validation",
    "data_prefixes",
    "launch_environment",
    "sequences_per_dataset",
]

_MAGIC = b"MMIDIDX\x00\x00"
_ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Megatron's type codes (``IndexedDataset``'s DType): uint8, int8, int16, int32, int64, float64, float32, uint16."""


def _divides(size: int, size_flag: str, by: int, by_flag: str) -> Iterator[str]:
    if size % by:
        yield f"{size_flag} {size} is not a multiple of {by_flag} {by}: change one of the two"


def check_sizes(args: Namespace) -> None:
    """Check sizes that must divide each other. Raises one :class:`BadInput` for all that do not."""
    faults = Faults()
    with faults.collecting():
        for fault in _size_faults(args):
            faults.add(fault)
    faults.raise_if_any()


def _size_faults(args: Namespace) -> Iterator[str]:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    world = args.world_size
    yield from _length_faults(args)
    yield from _rate_faults(args)
    yield from _model_faults(args, tp, pp)
    if world < tp * pp * cp:
        yield (
            f"too few ranks: --tensor-model-parallel-size {tp} × --pipeline-model-parallel-size {pp} × "
            f"--context-parallel-size {cp} needs {tp * pp * cp}, there are {world}: start more (--nproc-per-node, "
            "--nnodes) or make the layout smaller"
        )
    elif world % (tp * pp * cp):
        yield (
            f"{world} ranks do not divide into --tensor-model-parallel-size {tp} × --pipeline-model-parallel-size {pp}"
            f" × --context-parallel-size {cp} = {tp * pp * cp}: change --nproc-per-node or the layout"
        )
    else:
        yield from _batch_faults(args, world // (tp * pp * cp))
        yield from _interleaving_faults(args, pp, world // (tp * pp * cp))


def _length_faults(args: Namespace) -> Iterator[str]:
    """Yield flags that Megatron needs to count the samples of a run, and divides by without a look."""
    if not args.skip_train and not args.train_iters and not args.train_samples:
        yield "the length of the training is missing: give --train-iters or --train-samples"
    if args.multiple_validation_sets and not args.full_validation:
        yield "--multiple-validation-sets: Megatron evaluates several sets in full only: add --full-validation"
    if not args.skip_train and not args.full_validation and not args.eval_interval:
        yield (
            "--eval-interval is missing or 0, and Megatron counts validation samples by it: give the steps between "
            "two validations (with --eval-iters 0 there is none)"
        )


def _rate_faults(args: Namespace) -> Iterator[str]:
    """Yield settings of the learning rate that Megatron's scheduler asserts not to get."""
    unit = "iters" if args.train_iters else "samples"
    whole, decay = getattr(args, f"train_{unit}"), getattr(args, f"lr_decay_{unit}", None)
    steps, flag = (whole, f"--train-{unit}") if decay is None else (decay, f"--lr-decay-{unit}")
    warm_up = getattr(args, f"lr_warmup_{unit}", None) or 0
    if steps and getattr(args, "lr_warmup_fraction", None) is None and warm_up >= steps:
        yield f"--lr-warmup-{unit} {warm_up} must be less than {flag} {steps}: change one of the two"
    highest = getattr(args, "lr", None)
    for name in ("min_lr", "lr_warmup_init"):
        least = getattr(args, name, None) or 0.0
        if highest is not None and least > highest:
            yield f"--{name.replace('_', '-')} {least:g} is above --lr {highest:g}: change one of the two"
    if getattr(args, "lr_decay_style", None) == "WSD" and getattr(args, f"lr_wsd_decay_{unit}", None) is None:
        yield f"--lr-decay-style WSD needs the length of the decay at the end: give --lr-wsd-decay-{unit}"


def _model_faults(args: Namespace, tp: int, pp: int) -> Iterator[str]:
    tp_flag = "--tensor-model-parallel-size"
    if args.num_attention_heads:
        yield from _divides(args.num_attention_heads, "--num-attention-heads", tp, tp_flag)
        if args.hidden_size and args.kv_channels is None:
            yield from _divides(args.hidden_size, "--hidden-size", args.num_attention_heads, "--num-attention-heads")
    if args.group_query_attention and args.num_query_groups > tp:
        yield from _divides(args.num_query_groups, "--num-query-groups", tp, tp_flag)
    if args.sequence_parallel and args.seq_length:
        yield from _divides(args.seq_length, "--seq-length", tp, tp_flag)
    if args.num_layers and not _cut_unevenly(args):
        yield from _divides(args.num_layers, "--num-layers", pp, "--pipeline-model-parallel-size")


def _cut_unevenly(args: Namespace) -> bool:
    """Return whether stages may hold different numbers of layers."""
    uneven = (
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "hybrid_layer_pattern",
        "heterogeneous_layers_config_path",
        "heterogeneous_layers_config_encoded_json",
    )
    return any(getattr(args, name, None) for name in uneven)


def _batch_faults(args: Namespace, dp: int) -> Iterator[str]:
    if args.micro_batch_size is None or getattr(args, "decrease_batch_size_if_needed", False):
        return
    wave = args.micro_batch_size * dp
    for size, given in batch_sizes(args):
        if size % wave:
            yield (
                f"{given} is not a multiple of --micro-batch-size {args.micro_batch_size} × {dp} data-parallel replicas"
            )


def batch_sizes(args: Namespace) -> tuple[tuple[int, str], ...]:
    """Return (samples, flag and value) of the sizes that a step may have; an increment counts as one.

    Raises :class:`BadInput` for a schedule that Megatron's calculator would refuse once the model is being built.
    """
    schedule, final = getattr(args, "step_batch_size_schedule", None), args.global_batch_size
    if schedule is not None:
        return tuple(_scheduled(schedule))
    whole = () if final is None else ((final, f"--global-batch-size {final}"),)
    if args.rampup_batch_size is None or final is None:
        return whole
    flag = f"--rampup-batch-size {' '.join(map(str, args.rampup_batch_size))}"
    try:
        start, increment, samples = map(int, args.rampup_batch_size)
    except ValueError as error:
        raise BadInput(f"{flag}: give three numbers: start batch size, increment, samples of the ramp-up") from error
    if min(start, increment) < 1 or samples < 0 or not start < final or (final - start) % increment:
        raise BadInput(
            f"{flag}: the batch size cannot grow from {start} by {increment} to --global-batch-size {final}: give a "
            "smaller start from which that is a whole number of increments"
        )
    return (*whole, (start, f"{flag}: start batch size {start}"), (increment, f"{flag}: increment {increment}"))


_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _scheduled(schedule: str) -> Iterator[tuple[int, str]]:
    """Yield the sizes of ``--step-batch-size-schedule``, which is a list of THRESHOLD:SIZE."""
    flag = f"--step-batch-size-schedule '{schedule}'"
    for entry in schedule.replace(",", " ").split():
        text = entry.partition(":")[2].upper()
        try:
            size = int(float(text.rstrip("KMBT")) * _SUFFIXES.get(text[-1:], 1))
        except ValueError as error:
            raise BadInput(f"{flag}: {entry} is no threshold and size, such as 250B:1536") from error
        yield size, f"{flag}: {size}"


def _interleaving_faults(args: Namespace, pp: int, dp: int) -> Iterator[str]:
    """Yield violations of the conditions of Megatron's interleaved schedule, which fails in the first step."""
    chunks = getattr(args, "num_virtual_stages_per_pipeline_rank", None)
    layers = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    if chunks is None and layers is None:
        return
    flag, given = ("--num-virtual-stages-per-pipeline-rank", chunks)
    if chunks is None:
        flag, given = ("--num-layers-per-virtual-pipeline-stage", layers)
    if args.num_layers and given and not _cut_unevenly(args) and args.num_layers % (pp * given):
        yield (
            f"--num-layers {args.num_layers} is not a multiple of --pipeline-model-parallel-size {pp} × "
            f"{flag} {given}: change one of the three"
        )
    if 1 in (chunks, layers and args.num_layers and args.num_layers // (pp * layers)):
        return  # one chunk a stage is a plain pipeline
    if pp == 1:
        yield f"{flag} interleaves pipeline stages: give --pipeline-model-parallel-size 2 or more"
        return
    if getattr(args, "microbatch_group_size_per_vp_stage", None) is not None:
        return
    for size, given in batch_sizes(args):
        count = size // ((args.micro_batch_size or 1) * dp)
        if count % pp:
            yield (
                f"{flag}: {given} is {count} micro-batches for each of {dp} replicas, not a multiple of "
                f"--pipeline-model-parallel-size {pp}: change the batch size, or leave {flag} out"
            )


# ---------------------------------------------------------------- data

_SOURCES = (
    "--data-path",
    "--train-data-path",
    "--valid-data-path",
    "--test-data-path",
    "--data-args-path",
    "--per-split-data-args-path",
)
"""Flags that name datasets."""


def data_prefixes(args: Namespace) -> tuple[tuple[str, str], ...]:
    """Return (flag, path prefix) of every dataset that the arguments name, without the weights of a blend.

    Raises :class:`BadInput` when a file that lists datasets cannot be read.
    """
    found: list[tuple[str, str]] = []
    for flag in _SOURCES:
        given = getattr(args, flag[2:].replace("-", "_"), None)
        if given is not None:
            found += [(flag, word) for word in (_listed(flag, given) if isinstance(given, str) else _prefixes(given))]
    return tuple(found)


def _prefixes(words: list[str]) -> list[str]:
    """Return the prefixes of a blend: one prefix, or weight and prefix alternating, or prefixes alone."""
    return [word for word in words if not _is_number(word)]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _listed(flag: str, path: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        if flag == "--data-args-path":
            return _prefixes(text.split())
        splits = json.loads(text)
        return [
            word
            for words in splits.values()
            for word in _prefixes(words.split() if isinstance(words, str) else [str(item) for item in words])
        ]
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"{flag} {path}: {error}") from error


def sequences_per_dataset(args: Namespace) -> dict[str, list[int]] | None:
    """Return path prefix → numbers of sequences and documents of ``--per-dataset-sequences-path``, if it is given.

    Raises :class:`BadInput` if the file has other contents, or not each dataset.
    """
    flag, path = "--per-dataset-sequences-path", args.per_dataset_sequences_path
    if path is None:
        return None
    try:
        found = {
            prefix: [int(number) for number in counts] for prefix, counts in json.loads(Path(path).read_text()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"{flag} {path}: {error}") from error
    missing = [prefix for _, prefix in data_prefixes(args) if len(found.get(prefix, ())) != 2]
    if missing:
        raise BadInput(f"{flag} {path} has no [sequences, documents] of {missing[0]}: add it, or leave out the flag")
    return found


def check_sources(args: Namespace) -> None:
    """Raise :class:`BadInput` if both mock data and datasets are given."""
    named = [flag for flag in _SOURCES if getattr(args, flag[2:].replace("-", "_"), None)]
    if args.mock_data and named:
        raise BadInput(f"--mock-data and {named[0]} exclude each other: leave one of them out")


def check_data(args: Namespace) -> None:
    """Check that every named dataset exists and its index fits its data. Raises one :class:`BadInput` for all faults.

    Datasets in object storage are left to Megatron, as is mock data.
    """
    faults = Faults()
    if args.mock_data:
        return
    with faults.collecting():
        named = [(flag, prefix) for flag, prefix in data_prefixes(args) if "://" not in prefix]
        if getattr(args, "sft", False):
            for fault in conversation_faults(args, named):
                faults.add(fault)
        else:
            for flag, prefix in named:
                with faults.collecting():
                    sequences = check_index(flag, prefix)
                    if flag in ("--data-path", "--data-args-path"):
                        _check_shares(args, flag, prefix, sequences)
    for flag in ("--vocab-file", "--merge-file"):
        path = getattr(args, flag[2:].replace("-", "_"), None)
        if path is not None and not Path(path).is_file():
            faults.add(f"{flag} {path}: no such file")
    faults.raise_if_any()


def _check_shares(args: Namespace, flag: str, prefix: str, sequences: int) -> None:
    """Check that every share of ``--split`` has data: Megatron would count the tokens of an empty one endlessly."""
    split: str | None = getattr(args, "split", None)
    if split is None:
        return
    from megatron.core.datasets import blended_megatron_dataset_config as config

    if not re.search("[1-9]", split):
        raise BadInput(f"--split {split} has no share above 0: give up to three numbers, such as 949,50,1")
    with translated():
        shares = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
    for name, share in zip(("training", "validation", "test"), shares, strict=True):
        if share is not None and round(share[0] * float(sequences)) >= round(share[1] * float(sequences)):
            raise BadInput(
                f"--split {split} leaves none of the {sequences} documents of {flag} {prefix} for {name}: "
                "give it 0 or a larger share, or more documents"
            )
    if getattr(args, "elastic", False) and not args.skip_train:  # plain Megatron does not evaluate then
        check_validation(args, shares[0], shares[1])


def check_index(flag: str, prefix: str) -> int:
    """Check that ``prefix.idx`` and ``prefix.bin`` exist, are well formed and fit; return the number of sequences."""
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    for path in (index, data):
        if not path.is_file():
            raise BadInput(
                f"{flag} {prefix}: {path} is not there (give the path without .idx or .bin; "
                "make it with tools/preprocess_data.py)"
            )
    with index.open("rb") as file:
        header = file.read(34)
        if len(header) < 34 or header[:9] != _MAGIC:
            raise BadInput(f"{flag} {prefix}: {index} is not a Megatron index (damaged?): preprocess the data again")
        version, code, sequences, documents = struct.unpack("<QBQQ", header[9:34])
        expected = 34 + sequences * 12 + documents * 8
        size = index.stat().st_size
        if version != 1 or code not in _ITEM_BYTES or size not in (expected, expected + sequences):
            raise BadInput(
                f"{flag} {prefix}: {index} has {size} bytes where its header says {expected}: "
                "it was cut or damaged; preprocess the data again"
            )
        lengths = file.read(sequences * 4)
        tokens, last = _sum_lengths(lengths), _sum_lengths(lengths[-4:])
        # Begin of the last sequence and end of the last document: a truncation or a hole also shows there.
        file.seek((sequences - 1) * 8, os.SEEK_CUR)
        begins = int.from_bytes(file.read(8), "little")
        file.seek((documents - 1) * 8, os.SEEK_CUR)
        ends = int.from_bytes(file.read(8), "little")
    if not tokens:
        raise BadInput(f"{flag} {prefix}: {index} has no text in it: preprocess the data again, or leave it out")
    if data.stat().st_size < tokens * _ITEM_BYTES[code]:
        raise BadInput(
            f"{flag} {prefix}: {data} has {data.stat().st_size} bytes where {index.name} says "
            f"{tokens * _ITEM_BYTES[code]}: it was cut; preprocess the data again"
        )
    if begins + last * _ITEM_BYTES[code] > data.stat().st_size or ends != sequences:
        raise BadInput(
            f"{flag} {prefix}: {index} is damaged (its last sequence begins at byte {begins}, its last "
            f"document ends after {ends} of {sequences} sequences): preprocess the data again"
        )
    return int(sequences)


_WINDOWS, _WINDOW_BYTES = 64, 64 << 10
"""Windows of a dataset that are read, evenly spread: all of a small one, enough of a large one to check its tokens."""


def check_tokens(args: Namespace, vocabulary: int) -> None:
    """Check that the tokens of every named dataset are below ``vocabulary``. Raises :class:`BadInput`.

    Only a sample of a large dataset is read: it finds data of another tokenizer, not every damaged byte.
    Conversations (``--sft``) have no tokens yet.
    """
    if args.mock_data or getattr(args, "sft", False):
        return
    for flag, prefix in data_prefixes(args):
        if "://" not in prefix:
            _check_tokens(flag, prefix, vocabulary)


def _check_tokens(flag: str, prefix: str, vocabulary: int) -> None:
    import numpy

    with open(prefix + ".idx", "rb") as file:
        code = struct.unpack("<QBQQ", file.read(34)[9:34])[1]
    kinds = ("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")  # Megatron's type codes from 1 on
    size, width = os.path.getsize(prefix + ".bin"), _ITEM_BYTES[code]
    step = max(_WINDOW_BYTES, size // _WINDOWS) // width * width
    with open(prefix + ".bin", "rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            raw = file.read(min(_WINDOW_BYTES, size - start) // width * width)
            tokens = numpy.frombuffer(raw, dtype=kinds[code - 1])
            bad = numpy.flatnonzero((tokens < 0) | (tokens >= vocabulary))
            if bad.size:
                number = start // width + bad[0]
                raise BadInput(
                    f"{flag} {prefix}: token {tokens[bad[0]]} (number {number} of {prefix}.bin) is not in the "
                    f"vocabulary of {vocabulary}: made with another tokenizer, or damaged; preprocess the data again"
                )


def check_validation(args: Namespace, training: object, validation: object) -> None:
    """Check that a rank that reads data has a ``validation`` set if it evaluates. Raises :class:`BadInput`.

    Both are ``None`` if another rank of its tensor-parallel group reads the data.
    """
    wanted = "--full-validation" if args.full_validation else f"--eval-iters {args.eval_iters}"
    if (args.eval_iters or args.full_validation) and training is not None and validation is None:
        remedy = "leave it out" if args.full_validation else "give --eval-iters 0"
        raise BadInput(
            f"--split {args.split} leaves nothing for validation, which {wanted} asks for: give it a share, or {remedy}"
        )


def _sum_lengths(raw: bytes) -> int:
    """Return the sum of int32 sequence lengths."""
    import numpy  # imported here: only a run with real data needs it at this point

    return int(numpy.frombuffer(raw, dtype=numpy.int32).sum(dtype=numpy.int64))


# ---------------------------------------------------------------- environment

_PREFETCHED = 2
"""Number of batches that torch's loader prefetches in each worker process."""


def check_shared_memory(args: Namespace, mount: str = "/dev/shm") -> None:
    """Check the size of ``mount``, through which loader workers pass batches. Raises :class:`BadInput`.

    With too little space a worker would end later with SIGBUS.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not args.num_workers or not args.seq_length or not args.micro_batch_size or not os.path.isdir(mount):
        return
    sample = args.seq_length * 28  # tokens, labels and positions of 8 bytes, a mask of 4
    if getattr(args, "create_attention_mask_in_dataloader", False):
        sample += args.seq_length**2
    needed = ranks * args.num_workers * _PREFETCHED * args.micro_batch_size * sample
    found = os.statvfs(mount)
    if found.f_bavail * found.f_frsize < needed:
        raise BadInput(
            f"{mount} has {found.f_bavail * found.f_frsize >> 10} KiB free, but --num-workers {args.num_workers} needs "
            f"up to {needed >> 10} KiB there for samples: mount a larger one, or give --num-workers 0"
        )


@contextmanager
def launch_environment(platform: str, args: Namespace) -> Iterator[None]:
    """Set the environment that Megatron requires for NCCL, if there is no NCCL; the context restores it."""
    needed = platform == "cpu" and args.deterministic_mode and "NCCL_ALGO" not in os.environ
    if needed:
        os.environ["NCCL_ALGO"] = "Tree"
    try:
        yield
    finally:
        if needed:
            os.environ.pop("NCCL_ALGO", None)
