"""Imports of Megatron's modules that fail on this machine although training on it needs nothing of them.

Some modules import triton, which is installed beside a GPU, or a name of the standard library of Python 3.12, outside
of any ``try``. Each row of :data:`ROWS` names such a module, the import, and the object that its import statement gets.

Invariants
- The object is given to the import statements of that module alone. ``sys.modules`` never holds a stand-in, so any
  other module that asks for triton, such as torch's compiler, still hears that it is not installed.
- Where the import works (triton is installed, Python is newer), nothing is replaced.
- A kernel that was declared with the stand-in raises when it is called.
"""

from __future__ import annotations

import builtins
import importlib.util
import typing
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import typing_extensions

from megatron.elastic.mcore.patching.import_hook import before_import

__all__ = ["ROWS", "AbsentImport", "install", "kernels_without_triton", "triton_is_absent", "typing_is_old"]


@dataclass(frozen=True)
class AbsentImport:
    """One import of one module. ``absent()``: it fails here; ``substitute()``: the object in its place.

    ``versions``: releases of megatron-core whose module has it, as in the patch table.
    """

    importer: str
    imported: str
    versions: str
    absent: Callable[[], bool]
    substitute: Callable[[], Any]
    reason: str


class _Kernel:
    """A kernel of Megatron on a machine without triton: declared, never launched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError(f"{self.__name__} is a Triton kernel and triton is not installed: train without its flag")

    __call__ = __getitem__


class _Settings:
    """One choice of launch settings among which triton would tune."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


def _undecorated(*_: Any, **__: Any) -> Callable[[_Kernel], _Kernel]:
    """Return a decorator that leaves a kernel as it is, whatever it would be tuned for."""
    return lambda kernel: kernel


def triton_is_absent() -> bool:
    """Return whether ``import triton`` fails."""
    return importlib.util.find_spec("triton") is None


def kernels_without_triton() -> ModuleType:
    """Return a module that has what declaring a kernel takes, and nothing that a launch takes."""
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    vars(triton).update(jit=_Kernel, language=language, autotune=_undecorated, Config=_Settings, __version__="0")
    vars(language).update(constexpr=type("constexpr", (), {}), int64=type("int64", (), {}))
    return triton


def typing_is_old() -> bool:
    """Return whether this Python's ``typing`` lacks the names of 3.12."""
    return not hasattr(typing, "override")


_KERNELS = "declares kernels for experts whose activations are paged out, which only a GPU runs"
_STATE_SPACE = "declares kernels of state-space layers, which only a GPU runs; the models of a script import them"
_OVERRIDE = "imports typing.override, which is new in Python 3.12; typing_extensions has the same for older versions"


def _triton(importer: str, versions: str, reason: str = _KERNELS) -> AbsentImport:
    return AbsentImport(importer, "triton", versions, triton_is_absent, kernels_without_triton, reason)


def _typing(importer: str, versions: str) -> AbsentImport:
    return AbsentImport(importer, "typing", versions, typing_is_old, lambda: typing_extensions, _OVERRIDE)


ROWS: tuple[AbsentImport, ...] = (
    _triton("megatron.core.transformer.moe.paged_stash", ">=0.18,<0.19"),
    _triton("megatron.core.transformer.moe.ops.paged_stash", ">=0.19"),
    *(
        _triton(f"megatron.core.ssm.ops.{module}", ">=0.20", _STATE_SPACE)
        for module in (
            "common.causal_conv1d_varlen",
            "mamba2.batch_invariant_decode",
            "mamba2.ssd_bmm",
            "mamba2.ssd_chunk_scan",
            "mamba2.ssd_chunk_state",
            "mamba2.ssd_state_passing",
        )
    ),
    _typing("megatron.training.models.gpt", ">=0.19"),
    _typing("megatron.training.models.hybrid", ">=0.18"),
)
"""The contract test finds the same imports in each release."""


def install() -> None:
    """Wait for the modules of :data:`ROWS` whose imports fail on this machine. Idempotent."""
    for importer in dict.fromkeys(row.importer for row in ROWS if row.absent()):
        before_import(importer, _provide)


def _provide(module: ModuleType) -> None:
    """Let the import statements of ``module``, not executed yet, get the objects of its rows."""
    given = {row.imported: row.substitute() for row in ROWS if row.importer == module.__name__ and row.absent()}

    def importing(name: str, *context: Any, **more: Any) -> Any:
        found = given.get(name.partition(".")[0])
        return builtins.__import__(name, *context, **more) if found is None else found

    # The import statement looks __import__ up among the builtins of the module that it stands in.
    vars(module)["__builtins__"] = {**vars(builtins), "__import__": importing}
