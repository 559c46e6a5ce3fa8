"""A byte-level BPE tokenizer trained on a corpus (Hugging Face ``tokenizers``), in the formats Megatron reads.

Idea: byte-level BPE (Radford et al. 2019, section 2.2; Sennrich et al. 2016)
needs no unknown token. The merges are written three times over: ``vocab.json``
with ``merges.txt``, ``tokenizer.json``, and ``tiktoken.json``. Megatron 0.17
needs the ``transformers`` package, and for ``GPT2BPETokenizer`` a download, to
read the first two; the last it reads alone, as ``--tokenizer-type
TikTokenizer``. All of them give the same tokens for the same text.

Invariant: the first 256 ranks are the 256 bytes in order, and special tokens
come before them, as Megatron's TikTokenizer wants it.

    python tools/train_tokenizer.py --input corpus.jsonl --output-dir tokenizer --vocab-size 2048
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["SPECIAL_TOKENS", "main", "megatron_arguments", "train"]

# Megatron's TikTokenizer requires these seven by name; the eighth keeps sizes a multiple of eight.
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>", "<SPECIAL_7>")
# Megatron's pattern "v1": words, single digits, punctuation, line ends, blanks.
PATTERN = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


def read_texts(path: Path, key: str) -> Iterator[str]:
    """The text of each line of a JSONL file; ValueError names the first line that is not such."""
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[key]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f'--input {path}, line {number}: not a JSON object with a "{key}" field') from error
            if not isinstance(text, str):
                raise ValueError(f'--input {path}, line {number}: "{key}" is not a string')
            yield text


def byte_symbols() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE files → that byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


def train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train on ``texts``; ``vocab_size`` counts special tokens and bytes.

    Raises ValueError if the corpus does not hold that many distinct tokens.
    """
    floor = len(SPECIAL_TOKENS) + 256
    if vocab_size < floor:
        raise ValueError(f"--vocab-size {vocab_size}: must be at least {floor} (special tokens and bytes)")
    symbols = sorted(byte_symbols(), key=byte_symbols().__getitem__)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS), initial_alphabet=symbols, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned = json.loads(tokenizer.to_str())["model"]["merges"]
    if tokenizer.get_vocab_size() + len(SPECIAL_TOKENS) < vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size}: the corpus gives only {tokenizer.get_vocab_size()} tokens; lower it"
        )
    return renumbered(tokenizer, symbols, [(first, second) for first, second in learned])


def renumbered(tokenizer: Tokenizer, symbols: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    """The same merges with the ids Megatron expects: special tokens, bytes in order, merges in order."""
    # A token can be reached by two merges; it has one rank, the first.
    names = list(dict.fromkeys([*symbols, *(first + second for first, second in merges)]))
    vocabulary = {name: len(SPECIAL_TOKENS) + rank for rank, name in enumerate(names)}
    vocabulary |= {name: index for index, name in enumerate(SPECIAL_TOKENS)}
    result = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    result.pre_tokenizer, result.decoder = tokenizer.pre_tokenizer, tokenizer.decoder
    result.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    return result


def tiktoken_entries(tokenizer: Tokenizer) -> list[dict[str, object]]:
    """The ranks without the special tokens, in the JSON form Megatron's TikTokenizer loads."""
    to_byte = byte_symbols()
    entries: list[dict[str, object]] = []
    for index in range(len(SPECIAL_TOKENS), tokenizer.get_vocab_size()):
        name = tokenizer.id_to_token(index)
        assert name is not None  # ids have no holes
        content = bytes(to_byte[symbol] for symbol in name)
        entries.append(
            {
                "rank": len(entries),
                "token_bytes": base64.b64encode(content).decode(),
                "token_str": content.decode("utf-8", errors="replace"),
            }
        )
    return entries


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write all formats; the folder appears under its name only when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    partial.chmod(0o755)
    try:
        tokenizer.model.save(str(partial))  # vocab.json, merges.txt
        tokenizer.save(str(partial / "tokenizer.json"))
        (partial / "tiktoken.json").write_text(json.dumps(tiktoken_entries(tokenizer)))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (partial / "tokenizer_config.json").write_text(json.dumps(config))
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def megatron_arguments(folder: Path) -> list[str]:
    """The flags with which Megatron (and ``preprocess_data.py``) reads the tokenizer in ``folder``."""
    ranks = len(json.loads((folder / "tiktoken.json").read_text()))
    return [
        *("--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(folder / "tiktoken.json")),
        *("--tiktoken-pattern", "v1", "--tiktoken-num-special-tokens", str(len(SPECIAL_TOKENS))),
        *("--vocab-size", str(ranks + len(SPECIAL_TOKENS))),
    ]


def main(argv: list[str] | None = None) -> int:
    """Command line; exit status 1 with one line on bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", type=Path, required=True, help="JSONL corpus")
    parser.add_argument("--json-key", default="text", help="field that holds the text")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write")
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens, special ones and bytes included")
    args = parser.parse_args(argv)
    try:
        tokenizer = train(read_texts(args.input, args.json_key), args.vocab_size)
        save(tokenizer, args.output_dir)
    except (OSError, ValueError) as error:
        print(f"train_tokenizer: {error}", file=sys.stderr)
        return 1
    print(f"{args.output_dir}: {tokenizer.get_vocab_size()} tokens")
    print("Megatron flags: " + " ".join(megatron_arguments(args.output_dir)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
