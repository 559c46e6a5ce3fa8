"""The adaptor waits for Megatron instead of importing it; its callback runs once, at the right moment."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.elastic.mcore.patching.import_hook import after_import


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package whose ``__init__`` binds a name by value, importable under a fresh name."""
    name = "hooked_package"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "inner.py").write_text("VALUE = 1\ndef function():\n    return VALUE\n")
    (folder / "__init__.py").write_text("from .inner import function\nREADY = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[module]


def test_the_callback_runs_once_after_the_modules_own_code(package: str) -> None:
    seen: list[bool] = []
    after_import(package, lambda: seen.append(sys.modules[package].READY))
    assert seen == []
    importlib.import_module(package + ".inner")
    assert seen == [True]
    importlib.reload(sys.modules[package])
    assert seen == [True]


def test_a_module_that_is_there_already_needs_no_waiting(package: str) -> None:
    importlib.import_module(package)
    seen: list[int] = []
    after_import(package, lambda: seen.append(1))
    assert seen == [1]


def test_waiting_twice_calls_once(package: str) -> None:
    seen: list[int] = []
    after_import(package, lambda: seen.append(1))
    after_import(package, lambda: seen.append(2))
    importlib.import_module(package)
    assert seen == [1]


def test_the_module_keeps_its_own_loader_and_sources(package: str) -> None:
    after_import(package, lambda: None)
    module = importlib.import_module(package)
    assert module.__spec__ is not None and type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert "return VALUE" in inspect.getsource(module.function)


def test_a_module_that_does_not_exist_is_still_missing() -> None:
    before = list(sys.meta_path)
    after_import("no_such_package_at_all", lambda: None)
    try:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_package_at_all")
    finally:
        sys.meta_path[:] = before
