"""A hook that runs a function right after the first import of a module.

The adaptor is imported before Megatron and must import quickly, so it waits
for ``megatron.training`` instead of importing it. Invariant: the callback runs
once, after the module's own code and before the importer goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["after_import"]


class _HookLoader(Loader):
    """A module's own loader, with a call at the end."""

    def __init__(self, inner: Any, then: Callable[[], None]) -> None:
        self._inner = inner
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._then()


class _Finder(MetaPathFinder):
    """Finds one module and wraps its loader."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        sys.meta_path.remove(self)
        spec.loader = _HookLoader(spec.loader, self._then)
        return spec


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call ``then()`` once, right after the import of module ``name``; at once if it is imported already."""
    if name in sys.modules:
        then()
    elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, then))
