"""The imports of the zygote before it forks: the part of a script's own imports that is safe to share.

Only the script's top-level imports of torch, numpy and megatron are taken, in its
order: anything else might look at its rank while it is imported. Nothing is
preloaded that the script (or ``--adapt``) would not have imported itself, so a
script that does not ask for the adaptor is not adapted.
"""

from __future__ import annotations

import ast
import importlib.util

from megatron.elastic.launch.workers.zygote_messages import Kind

__all__ = ["modules_for"]

_SHARED = ("numpy", "torch", "megatron")
_ALWAYS = ("numpy", "torch", "torch.distributed", "megatron.elastic.control.client")
_ADAPTOR = "megatron.elastic.adaptor"
_HOST = "megatron.elastic.mcore.loop.training_loop"
"""The imports of the adaptor once it has parsed --elastic."""


def modules_for(kind: Kind, target: str, adapt: bool, elastic: bool) -> tuple[str, ...]:
    """Modules to preload for ``target``, in the order of import."""
    if kind == "program":
        return ()
    imported = _imports(_source(kind, target))
    if adapt:
        imported = [_ADAPTOR, *imported]
    if _ADAPTOR in imported and elastic and any(name.startswith("megatron.training") for name in imported):
        imported.append(_HOST)
    return tuple(dict.fromkeys((*_ALWAYS, *imported)))


def _source(kind: Kind, target: str) -> bytes:
    try:
        if kind == "module":
            spec = importlib.util.find_spec(target)
            target = spec.origin if spec is not None and spec.origin is not None else ""
        with open(target, "rb") as file:
            return file.read()
    except (OSError, ImportError, ValueError):
        return b""  # the worker will say what is wrong


def _imports(source: bytes) -> list[str]:
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names.append(node.module)
    return [name for name in names if name.partition(".")[0] in _SHARED]
