r"""Tokenize a JSONL corpus into Megatron's ``.bin``/``.idx`` with Megatron-LM's own flags.

Everything that defines the format is Megatron's: tokenizer flags and classes
(``megatron.training.arguments``, ``megatron.core.tokenizers``) and the writer
(``megatron.core.datasets.indexed_dataset``). Here is only the walk over lines.

Invariants: documents keep the order of the lines whatever ``--workers``; the
files get their names when both are complete, index last, so a dataset cut
short is never found; bad input is one line that names the flag, exit status 1.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus \\
        --tokenizer-type TikTokenizer --tokenizer-model tokenizer/tiktoken.json --append-eod --workers 2
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import importlib.util
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from tqdm import tqdm

__all__ = ["InputError", "main", "preprocess"]


class InputError(ValueError):
    """Input that cannot be used; the text names the flag and the fix."""


def _reason(args: argparse.Namespace, error: Exception) -> str:
    """Return the cause of a tokenizer that cannot be built, and the fix where Megatron's own words do not show it."""
    if args.tokenizer_type == "HuggingFaceTokenizer" and importlib.util.find_spec("transformers") is None:
        return "it needs the package transformers (pip install transformers), or use TikTokenizer"
    if args.tokenizer_type == "TikTokenizer" and isinstance(error, AssertionError):
        flags = "--vocab-size, --tiktoken-num-special-tokens and --tiktoken-pattern"
        return f"{flags} do not fit it (tools/train_tokenizer.py prints them) {error}".rstrip()
    return str(error) or type(error).__name__


@dataclass
class Encoder:
    """Tokenizes one line; built once in each worker process."""

    args: argparse.Namespace
    tokenizer: Any = field(init=False)

    def __post_init__(self) -> None:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

        try:
            self.tokenizer = build_tokenizer(self.args)
        except Exception as error:  # each tokenizer library has exceptions of its own
            given = self.args.tokenizer_model or self.args.vocab_file
            text = f"--tokenizer-type {self.args.tokenizer_type}: cannot read {given}: {_reason(self.args, error)}"
            raise InputError(text) from error

    def encode(self, numbered: tuple[int, str]) -> list[list[int]]:
        """Token ids of each JSON key of one line (empty list: nothing to write for that key)."""
        number, line = numbered
        try:
            record = json.loads(line)
            texts = [record[key] for key in self.args.json_keys]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            wanted = ", ".join(self.args.json_keys)
            raise InputError(
                f"--input {self.args.input}, line {number}: not a JSON object with --json-keys {wanted}"
            ) from error
        documents = []
        for key, text in zip(self.args.json_keys, texts, strict=True):
            if not isinstance(text, str):
                raise InputError(f'--input {self.args.input}, line {number}: "{key}" is not a string')
            ids = list(self.tokenizer.tokenize(text))
            if ids and self.args.append_eod:
                ids.append(self.tokenizer.eod)
            documents.append(ids)
        return documents


class _Worker:
    """The encoder of a pool's process: set by its initializer, read by its tasks."""

    encoder: Encoder

    @classmethod
    def start(cls, args: argparse.Namespace) -> None:
        cls.encoder = Encoder(args)

    @classmethod
    def encode(cls, numbered: tuple[int, str]) -> list[list[int]]:
        return cls.encoder.encode(numbered)


def read_lines(pattern: str) -> Iterator[tuple[int, str]]:
    """(line number, line) of every non-empty line of the files that match, in sorted order of name."""
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise InputError(f"--input {pattern}: no such file")
    for path in paths:
        try:
            with open(path, encoding="utf-8") as lines:
                yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        except UnicodeDecodeError as error:
            raise InputError(f"--input {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


@contextlib.contextmanager
def encoded(args: argparse.Namespace, encoder: Encoder) -> Iterator[Iterator[list[list[int]]]]:
    """The encoded lines in order, by ``encoder`` in this process or by ``--workers`` of them."""
    lines = read_lines(args.input)
    if args.workers == 1:
        yield map(encoder.encode, lines)
        return
    # spawn: a fork would copy locks that threads of the tokenizer's library may hold
    with multiprocessing.get_context("spawn").Pool(args.workers, _Worker.start, (args,)) as pool:
        yield pool.imap(_Worker.encode, lines, chunksize=8)


def preprocess(args: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Write ``{prefix}_{key}_document.bin/.idx`` for every key; key → (documents, tokens).

    Raises InputError for unusable input, OSError where the disk says no.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    encoder = Encoder(args)
    prefixes = {key: f"{args.output_prefix}_{key}_document" for key in args.json_keys}
    counts = dict.fromkeys(args.json_keys, (0, 0))
    Path(args.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    try:
        builders = {
            key: IndexedDatasetBuilder(prefix + ".bin.partial", dtype=DType.optimal_dtype(encoder.tokenizer.vocab_size))
            for key, prefix in prefixes.items()
        }
        with encoded(args, encoder) as documents:
            for line in tqdm(documents, unit=" documents", disable=None, mininterval=args.log_interval / 1000):
                for key, ids in zip(args.json_keys, line, strict=True):
                    if ids:
                        builders[key].add_document(numpy.asarray(ids), [len(ids)])
                        counts[key] = (counts[key][0] + 1, counts[key][1] + len(ids))
        empty = [key for key, (count, _) in counts.items() if count == 0]
        if empty:
            raise InputError(f"--input {args.input}: no text under --json-keys {', '.join(empty)}")
        for key, prefix in prefixes.items():
            builders[key].finalize(prefix + ".idx.partial")
            os.replace(prefix + ".bin.partial", prefix + ".bin")
            os.replace(prefix + ".idx.partial", prefix + ".idx")
    finally:
        for prefix in prefixes.values():
            for suffix in (".bin.partial", ".idx.partial"):
                Path(prefix + suffix).unlink(missing_ok=True)
    return counts


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Megatron-LM's flags; those of its sentence splitter are refused. Raises InputError."""
    from megatron.training.arguments import _add_tokenizer_args

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _add_tokenizer_args(parser)
    parser.add_argument("--input", required=True, help="JSONL file (or a quoted pattern of them)")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="fields to take text from")
    parser.add_argument("--output-prefix", required=True, help="path of the output without suffix")
    parser.add_argument("--append-eod", action="store_true", help="append the end-of-document token")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    parser.add_argument(
        "--log-interval", type=int, default=1000, help="milliseconds between updates of the progress bar"
    )
    parser.add_argument("--split-sentences", action="store_true", help="refused: GPT data has no sentence boundaries")
    parser.add_argument("--partitions", type=int, default=1, help="refused above 1: use --workers")
    args = parser.parse_args(argv)
    if args.split_sentences:
        raise InputError("--split-sentences is not supported: it is for BERT and T5 data; leave it out")
    if args.partitions != 1:
        raise InputError("--partitions is not supported: use --workers")
    if args.workers < 1:
        raise InputError("--workers must be 1 or more")
    if args.tokenizer_type is None:
        raise InputError("--tokenizer-type is needed, e.g. TikTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer")
    for flag in ("vocab_file", "merge_file"):
        path = getattr(args, flag)
        if path and not os.path.exists(path):
            raise InputError(f"--{flag.replace('_', '-')} {path}: no such file")
    # Megatron's build_tokenizer reads these too.
    args.rank, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size = 0, 128, 1
    return args


def main(argv: list[str] | None = None) -> int:
    """Command line; exit status 1 with one line on bad input."""
    try:
        args = parse(argv)
        counts = preprocess(args)
    except (InputError, OSError) as error:
        print(f"preprocess_data: {error}", file=sys.stderr)
        return 1
    for key, (documents, tokens) in counts.items():
        print(f"{args.output_prefix}_{key}_document.bin/.idx: {documents} documents, {tokens} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
