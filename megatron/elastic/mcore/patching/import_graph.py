"""The imports that fail on a machine without a GPU or with an older Python, found in a release without importing it.

From the modules that a training script imports, the graph follows each import statement that runs at import time and
whose failure is not caught. The rows of :mod:`~megatron.elastic.mcore.patching.absent_imports` must name those that ask
for triton, or for a name that Python 3.11's ``typing`` lacks. The contract test compares both for each release.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megatron.elastic.mcore.patching.contract import Wheel

__all__ = ["ROOTS", "absent_imports_of"]

ROOTS = (
    "megatron.training",
    "megatron.training.training",
    "megatron.training.arguments",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.datasets.gpt_dataset",
)
"""What ``pretrain_gpt.py`` imports."""

_NEW_IN_TYPING = frozenset({"override", "TypeAliasType", "TypeIs", "ReadOnly", "NoDefault", "get_protocol_members"})
"""Names that Python 3.12 and 3.13 added."""


def absent_imports_of(wheel: Wheel) -> frozenset[tuple[str, str]]:
    """Return (module, imported package) of every import of triton, or of a new name of typing, that must succeed."""
    found: set[tuple[str, str]] = set()
    seen: set[str] = set()
    pending = list(ROOTS)
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        tree = wheel.module(name)
        if tree is None:
            continue
        pending.append(name.rpartition(".")[0])
        for node in _running(tree.body):
            for target, names in _targets(node, name, wheel):
                if target.partition(".")[0] == "triton" or (target == "typing" and names & _NEW_IN_TYPING):
                    found.add((name, target.partition(".")[0]))
                elif target.startswith("megatron."):
                    pending += [target, *(f"{target}.{each}" for each in names)]
    return frozenset(found)


def _running(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements that run when a module is imported and whose failure is not caught."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _running([*node.body, *node.orelse])
        elif isinstance(node, ast.Try) and not node.handlers:
            yield from _running([*node.body, *node.finalbody])
        elif isinstance(node, ast.With):
            yield from _running(node.body)


def _targets(node: ast.Import | ast.ImportFrom, module: str, wheel: Wheel) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield each module that a statement of ``module`` imports, with the names it takes from it."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, frozenset()
    else:
        yield wheel.source(node, module), frozenset(alias.name for alias in node.names)
