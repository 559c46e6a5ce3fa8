"""Every name that a docstring refers to exists: ``:class:`X```, ``:meth:`X.y```, ``:func:`f```, ``:mod:`m```."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests.unit.tools.test_design import PACKAGE, definitions

MODULES = {
    ".".join(("megatron.elastic", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
NATIVE = {"Deathwatch", "megatron.elastic._comm.ElasticProcessGroup"}
"""Classes of the extensions (csrc/*/bindings.cpp)."""


def endings(names: Iterable[str]) -> set[str]:
    """``a.b.c`` → ``a.b.c``, ``b.c``, ``c``."""
    return {".".join(parts[cut:]) for parts in (name.split(".") for name in names) for cut in range(len(parts))}


def test_references_of_docstrings_resolve() -> None:
    modules = endings(MODULES)
    names = endings(f"{module}.{name}" for module, path in MODULES.items() for name in definitions(path)) | NATIVE
    seen, missing = 0, []
    for module, path in MODULES.items():
        for kind, name in re.findall(r":(mod|class|meth|func|attr|data|exc):`~?([^`]+)`", path.read_text("utf-8")):
            seen += 1
            if name not in (modules if kind == "mod" else names):
                missing.append(f"{module}: {name}")
    assert missing == []
    assert seen > 200
