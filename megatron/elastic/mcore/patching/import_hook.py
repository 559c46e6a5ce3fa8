"""Hooks that run a function right before or after a module's own code at its first import.

The adaptor is imported before Megatron and must import quickly, so it waits for modules of Megatron instead of
importing them. Invariant: callbacks run in the importing thread, before the module's code with the module as an
argument, or after it and before the importer goes on. They run once, but again where an import failed and is repeated.
Looking for a module without importing it runs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["after_import", "before_import"]

First = Callable[[ModuleType], None]
Then = Callable[[], None]


class _HookLoader(Loader):
    """A module's own loader, with calls around it."""

    def __init__(self, inner: Any, finder: _Finder) -> None:
        self._inner = inner
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        for first in self._finder.first:
            first(module)
        self._inner.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for then in self._finder.then:
            then()


class _Finder(MetaPathFinder):
    """Finds one module and wraps its loader."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.first: list[First] = []
        self.then: list[Then] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _HookLoader(spec.loader, self)
        return spec


def _waiting_for(name: str) -> _Finder:
    for finder in sys.meta_path:
        if isinstance(finder, _Finder) and finder.name == name:
            return finder
    made = _Finder(name)
    sys.meta_path.insert(0, made)
    return made


def before_import(name: str, first: First) -> None:
    """Call ``first(module)`` once, right before the code of module ``name`` runs; never if it has been imported."""
    finder = None if name in sys.modules else _waiting_for(name)
    if finder is not None and not finder.first:
        finder.first.append(first)


def after_import(name: str, then: Then) -> None:
    """Call ``then()`` once, right after the import of module ``name``; at once if it is imported already."""
    if name in sys.modules:
        then()
        return
    finder = _waiting_for(name)
    if not finder.then:
        finder.then.append(then)
