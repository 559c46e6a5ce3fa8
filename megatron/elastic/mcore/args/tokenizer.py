"""The tokenizer of a run: a reason why it cannot be loaded is one line that names the flag and the fix.

Megatron loads it right after the arguments are validated. Its readers raise errors of many types for a missing file,
and a ``NameError`` or a ``TypeError`` for a missing package or flag.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from megatron.elastic.mcore.args.bad_input import BadInput, explain_assertion

__all__ = ["load_tokenizer", "tokenizer_named"]

_SENTENCE_PIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_OF_A_MODEL = (*_SENTENCE_PIECE, "HuggingFaceTokenizer", "SFTTokenizer", "TikTokenizer")
"""Types that take their file, folder or name from ``--tokenizer-model``."""
_OF_A_SIZE = ("NullTokenizer", "NullMultimodalTokenizer")
_TRANSFORMERS = ("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase", "HuggingFaceTokenizer")
_PACKAGES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(_SENTENCE_PIECE, "sentencepiece"),
        **dict.fromkeys((*_TRANSFORMERS, "SFTTokenizer"), "transformers"),
        "TikTokenizer": "tiktoken",
    }
)
"""Type of a tokenizer → the package that reads it."""
_FILE_FLAGS = ("--tokenizer-model", "--vocab-file", "--merge-file", "--tokenizer-metadata")
_REASON_LETTERS = 200


def load_tokenizer(args: Namespace) -> None:
    """Load the tokenizer as a start would, which sets ``args.padded_vocab_size``. Raises :class:`BadInput`."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # by now the patched one

    build_tokenizer(args)


@contextmanager
def tokenizer_named(args: Namespace) -> Iterator[None]:
    """Turn errors of the body, which loads the tokenizer of ``args``, into :class:`BadInput`."""
    _check_flags(args)
    try:
        yield
    except Exception as error:
        text = explain_assertion(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        files = [(flag, getattr(args, flag[2:].replace("-", "_"), None)) for flag in _FILE_FLAGS]
        named = [f"--tokenizer-type {args.tokenizer_type}", *(f"{flag} {value}" for flag, value in files if value)]
        raise BadInput(
            f"{' '.join(named)}: the tokenizer cannot be loaded ({' '.join(text.split())[:_REASON_LETTERS]}): "
            "check that these files are there and are of this type"
        ) from error


def _check_flags(args: Namespace) -> None:
    """Raise :class:`BadInput` for a flag or a package that Megatron would miss without naming it."""
    kind = args.tokenizer_type
    if getattr(args, "tokenizer_metadata", None):
        return  # it names the class and its library
    if kind is None:
        raise BadInput("--tokenizer-type is missing: give the type of the tokenizer that the data was made with")
    if kind in _OF_A_MODEL and not args.tokenizer_model:
        raise BadInput(f"--tokenizer-type {kind} needs --tokenizer-model: give the tokenizer's file or folder")
    if kind in _OF_A_SIZE and not args.vocab_size:
        raise BadInput(f"--tokenizer-type {kind} needs --vocab-size: give the number of tokens")
    package = _PACKAGES.get(kind)
    if package is not None and importlib.util.find_spec(package) is None:
        raise BadInput(f"--tokenizer-type {kind} needs the package {package}: pip install {package}")
