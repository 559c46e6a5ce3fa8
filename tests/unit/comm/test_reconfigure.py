"""Others' managers can drive our groups by torch's reconfiguration protocol."""

from __future__ import annotations

import ast
import os
import zipfile
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm import CommError, install
from megatron.elastic.comm.gloo import GlooFabric
from megatron.elastic.comm.reconfigure import members_of
from tools.bench._common import Here, Ranks

PROTOCOL = {
    "_supports_reconfigure": {"group"},
    "_get_reconfigure_handle": {"group"},
    "_reconfigure": {"uuid", "handles", "group", "timeout", "hints"},
}


def driven_by_a_manager(here: Here) -> list[float]:
    """A manager that knows the protocol only: all three, then without rank 1, then all again."""
    fabric = GlooFabric(here.rank, 3, 0, here.store(), timeout=20.0)
    install(fabric)
    world: Any = fabric.world
    group = fabric.group("dp", (0, 1, 2))
    assert world.supports_reconfigure and world._supports_reconfigure()
    totals = []
    for uuid, ranks in ((1, (0, 1, 2)), (2, (0, 2))):
        if here.rank not in ranks:
            break
        handles = here.exchange(f"{uuid}", world.get_reconfigure_handle(), ranks)
        ordered = [handles[rank] for rank in ranks]
        if uuid == 1:
            options = SimpleNamespace(uuid=uuid, handles=ordered, timeout=timedelta(seconds=20), hints={})
            assert world.reconfigure(options).wait()
        else:
            assert world._reconfigure(uuid, ordered).wait()
        tensor = torch.tensor([float(here.rank + 1)])
        dist.all_reduce(tensor, group=group)
        totals.append(float(tensor))
    return totals


def test_a_manager_shrinks_the_group_by_handles() -> None:
    with Ranks(3, driven_by_a_manager) as ranks:
        assert ranks.results(range(3)) == {0: [6.0, 4.0], 1: [6.0], 2: [6.0, 4.0]}


@pytest.mark.parametrize("text", ["", "{}", "[]", '"x"', '{"rank": 1}', "null"])
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(CommError, match="handle"):
        members_of([text])


def test_handles_must_not_renumber() -> None:
    handles = ['{"rank": 2, "incarnation": 0, "host": "a"}', '{"rank": 0, "incarnation": 0, "host": "a"}']
    with pytest.raises(CommError, match="ascending"):
        members_of(handles)
    with pytest.raises(CommError, match="two handles"):
        members_of([handles[0], handles[0]])


def newer_torch_source() -> str:
    """``distributed_c10d.py`` of a torch that has the protocol: installed, or a wheel in ELASTIC_WHEELS."""
    if hasattr(dist.distributed_c10d, "_supports_reconfigure"):
        return Path(dist.distributed_c10d.__file__).read_text(encoding="utf-8")
    for wheel in sorted(Path(os.environ.get("ELASTIC_WHEELS", "/nonexistent")).glob("torch-2.*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            source = archive.read("torch/distributed/distributed_c10d.py").decode()
        if "def _supports_reconfigure" in source:
            return source
    pytest.skip(f"torch {torch.__version__} has no reconfiguration, and ELASTIC_WHEELS holds no wheel that has")


def test_the_protocol_is_the_one_newer_torch_speaks() -> None:
    functions = {
        node.name: node for node in ast.walk(ast.parse(newer_torch_source())) if isinstance(node, ast.FunctionDef)
    }
    for name, wanted in PROTOCOL.items():
        arguments = functions[name].args
        found = {argument.arg for argument in arguments.args + arguments.kwonlyargs}
        assert wanted <= found, f"{name} takes {sorted(found)}"
    for name, attribute in (
        ("_supports_reconfigure", "supports_reconfigure"),
        ("_get_reconfigure_handle", "get_reconfigure_handle"),
        ("_reconfigure", "reconfigure"),
    ):
        called = {node.attr for node in ast.walk(functions[name]) if isinstance(node, ast.Attribute)}
        assert attribute in called, f"{name} delegates to {sorted(called)}"
