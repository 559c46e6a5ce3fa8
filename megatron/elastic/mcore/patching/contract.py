"""The contract of the patch table with releases of Megatron, checked without importing them.

    python -m megatron.elastic.mcore.patching.contract --record tests/unit/mcore/megatron_signatures.json

reads the wheel of every version in :data:`VERSIONS` with ``ast`` and writes, for
each patched symbol, the names of its parameters and of the values it returns. The
contract test compares releases with that record: a name or a shape that changed
in a new release, or a new row, shows as a difference.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.elastic.mcore.patching.patches import Patch
from megatron.elastic.mcore.patching.releases import in_range

__all__ = ["VERSIONS", "CallShape", "Wheel", "expected", "fetch", "shapes", "used_names"]

VERSIONS = ("0.17.1", "0.18.2", "0.19.2")
"""Releases checked by the contract; before 0.17 the package has megatron.core only."""

_CACHE = Path.home() / ".cache" / "megatron-elastic" / "wheels"


@dataclass(frozen=True)
class CallShape:
    """The interface of a function: parameter names, and the values of its last ``return``."""

    parameters: tuple[str, ...]
    returns: tuple[str, ...]


class Wheel:
    """The sources of one release."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self._names = frozenset(self._archive.namelist())

    def module(self, dotted: str) -> ast.Module | None:
        """Return the syntax tree of a module, ``None`` if the release lacks it."""
        base = dotted.replace(".", "/")
        for name in (f"{base}.py", f"{base}/__init__.py"):
            if name in self._names:
                return ast.parse(self._archive.read(name))
        return None

    def find(self, symbol: str) -> ast.FunctionDef | ast.ClassDef | None:
        """Return the definition of ``package.module.Class.method`` or ``package.module.function``, through imports."""
        parts = symbol.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            tree = self.module(".".join(parts[:cut]))
            if tree is not None:
                return self._within(tree, parts[cut:], ".".join(parts[:cut]))
        return None

    def _within(self, tree: ast.AST, names: Sequence[str], module: str) -> ast.FunctionDef | ast.ClassDef | None:
        for node in _definitions(tree):
            if isinstance(node, ast.ImportFrom):
                if node.module and any((alias.asname or alias.name) == names[0] for alias in node.names):
                    return self.find(".".join([self.source(node, module), *names]))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == names[0]:
                return node if len(names) == 1 else self._within(node, names[1:], module)
        return None

    def source(self, node: ast.ImportFrom, module: str) -> str:
        """Return the absolute name of the module that an import statement of ``module`` reads."""
        if not node.level:
            return node.module or ""
        is_package = f"{module.replace('.', '/')}/__init__.py" in self._names
        ups = node.level - 1 if is_package else node.level
        base = module.rsplit(".", ups)[0] if ups else module
        return f"{base}.{node.module}" if node.module else base


def _definitions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a body, including those under ``if`` and ``try``, last definition first."""
    for node in reversed(getattr(tree, "body", [])):
        if isinstance(node, ast.If | ast.Try):
            yield from _definitions(node)
        yield node


def fetch(version: str, cache: Path = _CACHE) -> Path:
    """Return the wheel of megatron-core ``version``, downloaded on first use (without dependencies).

    Raises ``OSError`` with pip's last line if the download fails.
    """
    folder = cache / version
    present = sorted(folder.glob("*.whl"))
    if present:
        return present[0]
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--ignore-requires-python",
        "--only-binary",
        "megatron-core",
        "--dest",
        str(folder),
        f"megatron-core=={version}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    present = sorted(folder.glob("*.whl"))
    if done.returncode or not present:
        raise OSError(f"megatron-core {version}: {(done.stderr.strip().splitlines() or ['no wheel'])[-1]}")
    return present[0]


def shapes(wheel: Wheel, symbols: Sequence[str]) -> dict[str, CallShape | None]:
    """Return the shape of every symbol; ``None`` for one that the release lacks."""
    return {symbol: _shape(wheel.find(symbol)) for symbol in symbols}


def _shape(node: ast.FunctionDef | ast.ClassDef | None) -> CallShape | None:
    if node is None:
        return None
    if isinstance(node, ast.ClassDef):
        return CallShape((), ())
    arguments = node.args
    names = [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [f"*{item.arg}" for item in (arguments.vararg, arguments.kwarg) if item is not None]
    returns = [item for item in ast.walk(node) if isinstance(item, ast.Return) and item.value is not None]
    values: tuple[str, ...] = ()
    if returns:
        value = max(returns, key=lambda item: item.lineno).value
        assert value is not None
        values = tuple(map(ast.unparse, value.elts)) if isinstance(value, ast.Tuple) else (ast.unparse(value),)
    return CallShape(tuple(names), values)


def expected(patches: Sequence[Patch], version: str) -> tuple[str, ...]:
    """Return the symbols that ``version`` must have, in table order."""
    found = [patch.symbol for patch in patches if in_range(version, patch.versions)]
    if in_range(version, "<0.17"):
        found = [symbol for symbol in found if symbol.startswith("megatron.core.")]
    return tuple(dict.fromkeys(found))


def used_names(source: str) -> frozenset[str]:
    """Return the argument names that a replacement reads as ``call["name"]``, from its maker's source.

    Names that are also tested (``"name" in call``) or assigned first are left out:
    the replacement works without them if a version lacks them.
    """
    tree = ast.parse(source)
    read: set[str] = set()
    optional: set[str] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id == "call"
            and isinstance(node.slice, ast.Constant)
            and isinstance(node.slice.value, str)
        ):
            (read if isinstance(node.ctx, ast.Load) else optional).add(node.slice.value)
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.left, ast.Constant)
            and isinstance(node.ops[0], ast.In)
            and isinstance(node.left.value, str)
        ):
            optional.add(node.left.value)
    return frozenset(read - optional)


def as_json(recorded: Mapping[str, Mapping[str, CallShape | None]]) -> str:
    """Return ``{version: {symbol: {"parameters": [...], "returns": [...]}}}`` as text."""
    plain = {
        version: {
            symbol: None if shape is None else {"parameters": shape.parameters, "returns": shape.returns}
            for symbol, shape in found.items()
        }
        for version, found in recorded.items()
    }
    return json.dumps(plain, indent=1, sort_keys=True) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Write the record."""
    parser = argparse.ArgumentParser(prog="python -m megatron.elastic.mcore.patching.contract", description=__doc__)
    parser.add_argument("--record", type=Path, required=True, metavar="PATH")
    path = parser.parse_args(arguments).record
    from megatron.elastic.mcore.patching.table import whole_table  # here: it imports Megatron

    patches = whole_table()
    recorded = {version: shapes(Wheel(fetch(version)), expected(patches, version)) for version in VERSIONS}
    path.write_text(as_json(recorded), encoding="utf-8")
    missing = [
        f"{version}: {symbol}"
        for version, found in recorded.items()
        for symbol, shape in found.items()
        if shape is None
    ]
    print("\n".join(missing) or "every symbol found in every version")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
