"""The table of all names replaced in megatron.training and megatron.core.

A :class:`Patch` names a symbol, a reason and versions, and makes the replacement from
the original. Names are replaced by object identity in every loaded module, so an
earlier ``from megatron.training.training import train_step`` of a script is
replaced too.

Invariants
- Applying twice is applying once; :meth:`PatchSet.undo` restores every place.
- A missing symbol within its row's version range is an error, never skipped silently.
- Replacements read arguments by name (:func:`bound`) and derive the returned values
  (:func:`return_names`), so they work with other signatures of other versions.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from megatron.elastic.mcore.patching.releases import PATCHED, in_range, installed_version

__all__ = ["Patch", "PatchError", "PatchSet", "Row", "apply", "bound", "describe", "return_names"]

Row = tuple[str, str, Callable[..., Any]]
"""(symbol, reason, original → replacement): a row of the table without versions and group."""


class PatchError(RuntimeError):
    """A symbol of the table is missing in this version of Megatron."""


@dataclass(frozen=True)
class Patch:
    """One replaced symbol.

    ``symbol``: dotted path of a function, class or method. ``make``: original →
    replacement. ``versions``: comma-separated comparisons on megatron-core's
    version, e.g. ``">=0.17,<0.20"``; outside them the row does not apply.
    ``group``: 'platform' (always, on this platform) or 'elastic' (with ``--elastic``).
    """

    symbol: str
    reason: str
    make: Callable[[Any], Any]
    versions: str = PATCHED
    group: str = "elastic"


@dataclass
class _Place:
    """One attribute or dictionary entry that was overwritten."""

    owner: Any
    name: str
    original: Any


@dataclass
class PatchSet:
    """The applied patches, in order, with every changed place."""

    applied: list[Patch] = field(default_factory=list)
    _places: list[_Place] = field(default_factory=list)

    def undo(self) -> None:
        """Restore every original, last first. Idempotent."""
        while self._places:
            place = self._places.pop()
            setattr(place.owner, place.name, place.original)
        self.applied.clear()

    def add(self, patches: Iterable[Patch]) -> None:
        """Apply rows in order, except those whose group has replaced their symbol already.

        Module-level names are replaced at the end, in one pass over all loaded modules.
        """
        found: dict[int, tuple[Any, Any]] = {}
        for patch in patches:
            if any((patch.symbol, patch.group) == (other.symbol, other.group) for other in self.applied):
                continue
            owner, name = _locate(patch.symbol)
            present = getattr(owner, name)
            _, original = found.get(id(present), (present, present))
            replacement = patch.make(original)
            if isinstance(owner, ModuleType):
                found[id(present)] = (present, replacement)
            else:
                raw = inspect.getattr_static(owner, name)
                self._set(owner, name, raw, _as_declared(raw, replacement))
            self.applied.append(patch)
        self._replace_everywhere(found)

    def _replace_everywhere(self, found: Mapping[int, tuple[Any, Any]]) -> None:
        """Overwrite, by identity, in the namespace of every loaded module. ``found``: id → (original, replacement)."""
        loaded: list[Any] = list(sys.modules.values()) if found else []
        for module in loaded:
            if not isinstance(module, ModuleType):
                continue
            for name, value in list(vars(module).items()):
                if id(value) in found:
                    self._set(module, name, *found[id(value)])

    def _set(self, owner: Any, name: str, original: Any, replacement: Any) -> None:
        self._places.append(_Place(owner, name, original))
        setattr(owner, name, replacement)


def _as_declared(raw: Any, replacement: Any) -> Any:
    """Return ``replacement`` as the kind of method that ``raw`` is: static, class or instance method."""
    if isinstance(raw, staticmethod):
        return staticmethod(replacement)
    if isinstance(raw, classmethod):
        return classmethod(replacement.__func__ if inspect.ismethod(replacement) else replacement)
    return replacement


def _locate(symbol: str) -> tuple[Any, str]:
    """Return (owner, attribute) of a dotted path: the longest importable module, then attributes."""
    parts = symbol.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            owner: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and name.startswith(error.name):
                continue
            raise
        for attribute in parts[cut:-1]:
            owner = getattr(owner, attribute, None)
        if owner is None or not hasattr(owner, parts[-1]):
            break
        return owner, parts[-1]
    raise PatchError(
        f"megatron-core {installed_version()}: {symbol} is missing, though the patch table expects it; "
        "run with a version that the support matrix lists"
    )


def apply(patches: Iterable[Patch], version: str | None = None, into: PatchSet | None = None) -> PatchSet:
    """Apply every row whose version range holds; return the set (``into``, if given).

    Raises :class:`PatchError` if an expected symbol is missing, after undoing the rows
    applied before it.
    """
    version = version or installed_version()
    patch_set = into if into is not None else PatchSet()
    try:
        patch_set.add(patch for patch in patches if in_range(version, patch.versions))
    except PatchError:
        patch_set.undo()
        raise
    return patch_set


def describe(patches: Sequence[Patch], version: str | None = None) -> str:
    """Return the table as text: one row a symbol."""
    version = version or installed_version()
    lines = [f"replaced in Megatron (megatron-core {version}):"]
    for patch in patches:
        state = patch.group if in_range(version, patch.versions) else "not this version"
        lines.append(f"  {patch.symbol}  [{state}; {patch.versions}]")
        lines += textwrap.wrap(patch.reason, 110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


# ---------------------------------------------------------------- adapting by signature


def bound(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of ``original`` by parameter name, with defaults."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    return dict(call.arguments)


@functools.cache
def return_names(original: Callable[..., Any]) -> tuple[str, ...]:
    """Return the source text of the values in ``original``'s last ``return``, in order.

    ``return a, b`` → ``("a", "b")``; a single value gives one name. A replacement
    returns the same values, which this version's caller unpacks.
    """
    function = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(original)))).body[0]
    returns = [node for node in _own_nodes(function) if isinstance(node, ast.Return) and node.value is not None]
    if not returns:
        return ()
    value = max(returns, key=lambda node: node.lineno).value
    values = value.elts if isinstance(value, ast.Tuple) else [value]
    return tuple(ast.unparse(item) for item in values if item is not None)


def _own_nodes(function: ast.AST) -> Iterable[ast.AST]:
    """Yield the nodes of a function's body, without those of nested functions."""
    pending = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        yield node
        pending.extend(ast.iter_child_nodes(node))
