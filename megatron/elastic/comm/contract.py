"""Newer torch's contract for process groups that change, read from the wheels without installing them.

    python -m megatron.elastic.comm.contract --record tests/unit/comm/torch_reconfigure.json

downloads the wheel of every version in :data:`VERSIONS`, reads its Python with
``ast`` and its C++ headers as text, and writes down what :mod:`reconfigure` and
``csrc/comm/torch`` rely on. The contract test compares our classes with that
record; a slow test compares the record with the wheels again.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["VERSIONS", "Protocol", "fetch", "read"]

VERSIONS = ("2.14.1", "2.15.0")
"""Releases held to the contract: every minor one since the protocol came."""

FUNCTIONS = ("_supports_reconfigure", "_get_reconfigure_handle", "_reconfigure")
_HEADERS = "torch/include/torch/csrc/distributed/c10d/"
_VIRTUALS = ("supportsReconfigure", "get_reconfigure_handle", "reconfigure")


@dataclass(frozen=True)
class Protocol:
    """One release's side of the protocol."""

    parameters: dict[str, list[str]]
    """Function of torch.distributed → its parameters."""
    delegates: dict[str, str]
    """Function of torch.distributed → the attribute of the group that it asks."""
    options: list[str]
    """Fields of ``ReconfigureOptions``."""
    virtuals: list[str]
    """Declarations in ``c10d::ProcessGroup``."""
    macro: bool
    """``C10D_BACKEND_HAS_RECONFIGURE`` is defined."""
    enabled_by: list[str]
    """Functions that take ``enable_reconfigure``."""


def fetch(version: str, folder: Path) -> Path:
    """The release's wheel, downloaded into ``folder``. Raises ``CalledProcessError``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    subprocess.run([*command, "--dest", str(folder), f"torch=={version}"], check=True)
    return next(folder.glob(f"torch-{version}*.whl"))


def read(wheel: Path) -> Protocol:
    """The protocol as ``wheel`` has it. Raises ``KeyError`` where a part is gone."""
    with zipfile.ZipFile(wheel) as archive:
        source = archive.read("torch/distributed/distributed_c10d.py").decode()
        stubs = archive.read("torch/_C/_distributed_c10d.pyi").decode()
        group = archive.read(f"{_HEADERS}ProcessGroup.hpp").decode()
        backend = archive.read(f"{_HEADERS}Backend.hpp").decode()
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    return Protocol(
        parameters={name: _parameters(functions[name]) for name in FUNCTIONS},
        delegates={name: _delegate(functions[name]) for name in FUNCTIONS},
        options=_fields(stubs, "ReconfigureOptions"),
        virtuals=[" ".join(found.split()) for name in _VIRTUALS for found in _declared(group, name)],
        macro="#define C10D_BACKEND_HAS_RECONFIGURE" in backend,
        enabled_by=sorted(name for name, node in functions.items() if "enable_reconfigure" in _parameters(node)),
    )


def _parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]


def _delegate(function: ast.FunctionDef) -> str:
    """The attribute of ``pg`` that the last ``return`` asks for."""
    last = function.body[-1]
    if not isinstance(last, ast.Return) or last.value is None:
        raise KeyError(f"{function.name} returns nothing")
    asked = last.value.func if isinstance(last.value, ast.Call) else last.value
    if not isinstance(asked, ast.Attribute):
        raise KeyError(f"{function.name} asks no attribute")
    return asked.attr


def _fields(stubs: str, name: str) -> list[str]:
    for node in ast.parse(stubs).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            ]
    raise KeyError(name)


def _declared(header: str, name: str) -> list[str]:
    return re.findall(rf"virtual [\w:<> ]+ {name}\([^)]*\)[ \w]*", header)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(prog="python -m megatron.elastic.comm.contract", description=__doc__)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--wheels", type=Path, help="a folder that holds the wheels already")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        record = {}
        for version in VERSIONS:
            found = sorted(chosen.wheels.glob(f"torch-{version}*.whl")) if chosen.wheels else []
            record[version] = asdict(read(found[0] if found else fetch(version, Path(scratch))))
    chosen.record.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
