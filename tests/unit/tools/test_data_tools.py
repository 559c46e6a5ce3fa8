"""The way from text to Megatron's .bin/.idx keeps the text, its order and its boundaries, and refuses bad input."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tools import make_corpus, preprocess_data, train_tokenizer

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = 512
LIBRARY = Path(asyncio.__file__).parent
"""A part of the standard library: reading all of it takes long."""
CORPUS = ["--max-bytes", "300000", "--library", str(LIBRARY)]


@dataclass(frozen=True)
class Prepared:
    """A small real corpus and the tokenizer trained on it."""

    corpus: Path
    tokenizer: Path
    texts: list[str]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("data")
    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
    assert make_corpus.main(["--output", str(corpus), *CORPUS]) == 0
    arguments = ["--input", str(corpus), "--output-dir", str(tokenizer), "--vocab-size", str(VOCABULARY)]
    assert train_tokenizer.main(arguments) == 0
    return Prepared(corpus, tokenizer, [json.loads(line)["text"] for line in corpus.read_text().splitlines()])


def flags(prepared: Prepared, output: Path, *more: str, corpus: Path | None = None) -> list[str]:
    """The usual flags; those in ``more`` win over them."""
    usual = ["--input", str(corpus or prepared.corpus), "--output-prefix", str(output)]
    return [*usual, *train_tokenizer.megatron_arguments(prepared.tokenizer), *more]


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_corpus_is_the_same_each_time_and_within_its_bound(prepared: Prepared, tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    assert make_corpus.main(["--output", str(again), *CORPUS]) == 0
    assert again.read_bytes() == prepared.corpus.read_bytes()
    assert sum(len(text.encode()) for text in prepared.texts) <= 300_000
    assert len(prepared.texts) > 10


def test_docstrings_come_in_order_of_appearance() -> None:
    methods = 'class C:\n    """Class."""\n    def m(self):\n        "Method."\n'
    source = '"""Module."""\ndef f():\n    """Function."""\n' + methods
    assert make_corpus.docstrings(source) == "Module.\n\nFunction.\n\nClass.\n\nMethod."
    assert make_corpus.docstrings("def broken(:") == ""


def test_corpus_of_an_empty_library_is_refused_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "corpus.jsonl"
    assert make_corpus.main(["--output", str(output), "--library", str(tmp_path)]) == 1
    assert "--input" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn x  # ça va — 日本語 🙂\r\n", "  12345 \n\n\n x+=1", "\x00\x7f\ufeff"]
)
def test_tokens_give_back_the_text(prepared: Prepared, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_vocabulary_is_special_tokens_then_bytes_then_merges_without_holes(prepared: Prepared) -> None:
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer / "tokenizer.json"))
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCABULARY))
    ranks = json.loads((prepared.tokenizer / "tiktoken.json").read_text())
    assert [entry["rank"] for entry in ranks] == list(range(VOCABULARY - len(train_tokenizer.SPECIAL_TOKENS)))


@pytest.mark.parametrize(("size", "word"), [("100", "at least"), ("60000", "lower it")])
def test_impossible_vocabulary_is_refused(
    prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str, word: str
) -> None:
    small = tmp_path / "small.jsonl"
    small.write_text(json.dumps({"text": "a b c"}) + "\n")
    output = tmp_path / "tokenizer"
    assert train_tokenizer.main(["--input", str(small), "--output-dir", str(output), "--vocab-size", size]) == 1
    error = capsys.readouterr().err
    assert "--vocab-size" in error and word in error
    assert not output.exists()


def read_dataset(prefix: Path) -> Iterator[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    return (dataset[index].tolist() for index in range(len(dataset)))


def test_megatron_reads_back_every_document_in_order(prepared: Prepared, tmp_path: Path) -> None:
    assert preprocess_data.main(flags(prepared, tmp_path / "c", "--append-eod")) == 0
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer / "tokenizer.json"))
    end = train_tokenizer.SPECIAL_TOKENS.index("</s>")
    # The trained tokenizer and Megatron's own class agree on every token of real text.
    assert list(read_dataset(tmp_path / "c_text_document")) == [
        [*tokenizer.encode(text).ids, end] for text in prepared.texts
    ]


def test_workers_do_not_change_a_byte(prepared: Prepared, tmp_path: Path) -> None:
    assert preprocess_data.main(flags(prepared, tmp_path / "one", "--append-eod")) == 0
    assert preprocess_data.main(flags(prepared, tmp_path / "two", "--append-eod", "--workers", "2")) == 0
    for suffix in (".bin", ".idx"):
        one, two = (tmp_path / f"{name}_text_document{suffix}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    ("given", "content", "words"),
    [
        (["--split-sentences"], '{"text": "a"}', ["--split-sentences"]),
        (["--partitions", "2"], '{"text": "a"}', ["--partitions", "--workers"]),
        (["--workers", "0"], '{"text": "a"}', ["--workers"]),
        ([], '{"text": "a"}\nnot json', ["--input", "line 2"]),
        ([], '{"text": "a"}\n{"body": "a"}', ["--input", "line 2", "--json-keys"]),
        ([], '{"text": 3}', ["line 1", "not a string"]),
        ([], "\n", ["--json-keys", "no text"]),
        (["--json-keys", "body"], '{"text": "a"}', ["--json-keys body"]),
        (["--tokenizer-model", "/nonexistent"], '{"text": "a"}', ["--tokenizer-type", "/nonexistent"]),
        (["--vocab-size", "4096"], '{"text": "a"}', ["--tokenizer-type", "--vocab-size", "do not fit"]),
        pytest.param(
            ["--tokenizer-type", "HuggingFaceTokenizer"],
            '{"text": "a"}',
            ["--tokenizer-type", "pip install transformers"],
            marks=pytest.mark.skipif(find_spec("transformers") is not None, reason="transformers is installed"),
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    prepared: Prepared,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    content: str,
    words: list[str],
) -> None:
    corpus = tmp_path / "bad.jsonl"
    corpus.write_text(content + "\n")
    assert preprocess_data.main(flags(prepared, tmp_path / "out" / "c", *given, corpus=corpus)) == 1
    error = last_line(capsys.readouterr().err)
    assert all(word in error for word in words), error
    assert not list((tmp_path / "out").glob("*"))


def test_missing_input_names_the_flag(prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess_data.main(flags(prepared, tmp_path / "c", corpus=tmp_path / "absent.jsonl")) == 1
    assert last_line(capsys.readouterr().err).startswith("preprocess_data: --input")


def test_full_disk_leaves_nothing_half_written(prepared: Prepared, tmp_path: Path) -> None:
    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails as it does on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    command = [
        sys.executable,
        "-W",
        "ignore",
        str(ROOT / "tools" / "preprocess_data.py"),
        *flags(prepared, tmp_path / "c"),
    ]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, preexec_fn=small_files, env=environment
    )
    assert done.returncode == 1, done.stderr
    assert "preprocess_data:" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
