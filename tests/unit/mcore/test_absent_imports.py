"""Imports that fail on this machine are stood in for in the module that has them, and nowhere else."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.elastic.mcore.patching import absent_imports
from megatron.elastic.mcore.patching.absent_imports import AbsentImport, kernels_without_triton

IMPORTER = "module_with_kernels"
SOURCE = """
import typing
import triton
import triton.language as tl
import other_module

NEW = triton.__version__ >= "2.2.0"

@triton.jit
def kernel(size, BLOCK: tl.constexpr):
    "Doubles."

@triton.autotune(configs=[triton.Config({"BLOCK": 8}, num_warps=4)], key=["size"])
@triton.jit
def tuned(size: tl.int64, BLOCK: tl.constexpr):
    "Halves."

def launch(which):
    which[(1,)](4)
"""
OTHER = """
try:
    import triton
    HAVE_TRITON = True
except ImportError:
    HAVE_TRITON = False
"""


@pytest.fixture
def importer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that declares kernels and imports another that asks for triton, with a row for the first alone."""
    if importlib.util.find_spec("triton") is not None:
        pytest.skip("triton is installed: nothing is stood in for")
    (tmp_path / f"{IMPORTER}.py").write_text(SOURCE)
    (tmp_path / "other_module.py").write_text(OTHER)
    monkeypatch.syspath_prepend(str(tmp_path))
    row = AbsentImport(IMPORTER, "triton", ">=0.17", absent_imports.triton_is_absent, kernels_without_triton, "a test")
    monkeypatch.setattr(absent_imports, "ROWS", (row,))
    hooks = list(sys.meta_path)
    yield IMPORTER
    sys.meta_path[:] = hooks
    for name in (IMPORTER, "other_module"):
        sys.modules.pop(name, None)


def test_kernels_are_declared_without_triton_and_refuse_to_run(importer: str) -> None:
    absent_imports.install()
    module = importlib.import_module(importer)
    for kernel, name in ((module.kernel, "kernel"), (module.tuned, "tuned")):
        with pytest.raises(RuntimeError, match=f"{name} is a Triton kernel and triton is not installed"):
            module.launch(kernel)


def test_no_other_module_hears_of_the_stand_in(importer: str) -> None:
    absent_imports.install()
    module = importlib.import_module(importer)
    assert not module.other_module.HAVE_TRITON and "triton" not in sys.modules
    assert module.typing is typing


def test_without_a_row_the_import_fails_as_before(importer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent_imports, "ROWS", ())
    absent_imports.install()
    with pytest.raises(ModuleNotFoundError, match="triton"):
        importlib.import_module(importer)


def test_what_is_there_is_not_stood_in_for(importer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = AbsentImport(importer, "typing", ">=0.17", lambda: False, kernels_without_triton, "a test")
    monkeypatch.setattr(absent_imports, "ROWS", (row, *absent_imports.ROWS))
    absent_imports.install()
    assert importlib.import_module(importer).typing is typing


def test_a_name_that_only_newer_pythons_have_comes_from_its_backport() -> None:
    for row in absent_imports.ROWS:
        if row.imported == "typing":
            assert all(
                hasattr(row.substitute(), name) for name in ("Any", "Callable", "ClassVar", "Literal", "override")
            )
