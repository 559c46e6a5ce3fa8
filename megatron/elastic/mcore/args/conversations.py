"""Checks of the files of conversations for ``--sft``, and of the packages that read them, before the model is built.

A file has one JSON object a line, whose ``messages`` each have a ``role`` and ``content`` (Megatron's
``SFTLowLevelDataset``). The first line is looked at, and no more.
"""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["conversation_faults"]

_TOKENIZER = "SFTTokenizer"


def conversation_faults(args: Namespace, files: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield what is wrong with ``files``, (flag, path), and with what is installed; one line a fault."""
    for flag, path in files:
        yield from _file_faults(flag, Path(path))
    if args.tokenizer_type != _TOKENIZER:
        yield f"--tokenizer-type {args.tokenizer_type} with --sft: only {_TOKENIZER} makes tokens of conversations"
    missing = [name for name in ("datasets", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        yield f"--sft needs {' and '.join(missing)}: pip install {' '.join(missing)}"
    elif int(version("transformers").split(".")[0]) >= 5 and not _knows_of_5():
        yield (
            f"--sft: this megatron-core's {_TOKENIZER} does not read what transformers {version('transformers')} "
            "returns: pip install 'transformers<5'"
        )


def _file_faults(flag: str, path: Path) -> Iterator[str]:
    if not path.is_file():
        yield f"{flag} {path}: no such file; --sft reads conversations, a JSON object a line"
        return
    with path.open("rb") as file:
        first = file.readline()
    try:
        row: Any = json.loads(first)
    except ValueError:
        row = None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        yield f'{flag} {path}: its first line is not {{"messages": [{{"role": …, "content": …}}, …]}}, as --sft reads'


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and {"role", "content"} <= value.keys()


def _knows_of_5() -> bool:
    """Return whether this release takes the results of transformers 5."""
    from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer

    return hasattr(SFTTokenizer, "_extract_token_ids")
