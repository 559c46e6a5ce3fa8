"""Files and packages for --sft are checked before anything is built, one line a fault."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron.elastic.mcore.args import conversations
from megatron.elastic.mcore.args.conversations import conversation_faults

SAID = {"role": "user", "content": "why"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The packages that the checks find, by name: their versions; a test may change them."""
    found: dict[str, Any] = {"transformers": "4.57.1", "datasets": "4.4.0"}
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    monkeypatch.setattr(conversations, "version", lambda name: found[name])
    monkeypatch.setattr(conversations, "_knows_of_5", lambda: False)
    return found


def faults(path: Path, kind: str = "SFTTokenizer") -> list[str]:
    return list(conversation_faults(Namespace(tokenizer_type=kind), [("--data-path", str(path))]))


def written(folder: Path, line: str) -> Path:
    path = folder / "chat.jsonl"
    path.write_text(line + "\n")
    return path


def test_a_file_of_conversations_passes(tmp_path: Path, installed: dict[str, Any]) -> None:
    assert faults(written(tmp_path, json.dumps({"messages": [SAID]}))) == []


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "{}", '{"messages": {}}', '{"messages": ["why"]}', json.dumps({"messages": [{"role": "user"}]})],
)
def test_a_file_of_something_else_is_named(tmp_path: Path, installed: dict[str, Any], line: str) -> None:
    (fault,) = faults(written(tmp_path, line))
    assert fault.startswith("--data-path") and "chat.jsonl" in fault and "messages" in fault and "\n" not in fault


def test_a_missing_file_and_another_tokenizer_are_named(tmp_path: Path, installed: dict[str, Any]) -> None:
    missing, tokenizer = faults(tmp_path / "nothing.jsonl", "NullTokenizer")
    assert "nothing.jsonl: no such file" in missing and "--tokenizer-type NullTokenizer" in tokenizer


def test_missing_packages_are_named_with_the_command(tmp_path: Path, installed: dict[str, Any]) -> None:
    installed.clear()
    (fault,) = faults(written(tmp_path, json.dumps({"messages": [SAID]})))
    assert fault == "--sft needs datasets and transformers: pip install datasets transformers"


def test_transformers_that_this_release_cannot_read_is_named(
    tmp_path: Path, installed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, json.dumps({"messages": [SAID]}))
    installed["transformers"] = "5.24.0"
    (fault,) = faults(path)
    assert "transformers 5.24.0" in fault and "pip install 'transformers<5'" in fault
    monkeypatch.setattr(conversations, "_knows_of_5", lambda: True)
    assert faults(path) == []
