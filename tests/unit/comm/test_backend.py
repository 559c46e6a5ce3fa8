"""torch.distributed on top of a fabric: by backend name, and what is replaced there and put back."""

from __future__ import annotations

import ast
import os
import zipfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron.elastic.comm.backend import REPLACED, install, make_fabric, register_backend
from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.comm.gloo.fabric import GlooFabric
from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.platform.cpu import CpuPlatform
from tools.bench._common import Here, Ranks


def by_name(here: Here) -> list[int]:
    def factory(store: dist.Store, rank: int, size: int, timeout: timedelta, dense: bool) -> Fabric:
        return GlooFabric(rank, size, 0, here.store(), timeout=timeout.total_seconds(), dense_world=dense)

    register_backend(factory)
    register_backend(factory)
    dist.init_process_group(
        "elastic", store=here.store(), rank=here.rank, world_size=here.size, timeout=timedelta(seconds=20)
    )
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    group = dist.new_group([0, 1], backend="nccl")
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    return tensor.int().tolist()


def test_init_process_group_by_backend_name() -> None:
    with Ranks(2, by_name) as ranks:
        assert ranks.results(range(2)) == {0: [4, 4], 1: [4, 4]}


def put_back(here: Here) -> None:
    originals = {name: getattr(c10d, name) for name in REPLACED}
    fabric = make_fabric(ElasticConfig(comm="gloo"), 0, 2, 0, "run", b"secret", dist.HashStore)
    installation = install(fabric)
    assert all(getattr(c10d, name) is not original for name, original in originals.items())
    with pytest.raises(CommError, match="initialized already"):
        install(fabric)
    with pytest.raises(ValueError, match="duplicate"):
        dist.new_group([0, 0])
    with pytest.raises(ValueError, match="2 slots"):
        dist.new_group([0, 2])
    installation.undo()
    installation.undo()
    assert not dist.is_initialized()
    assert all(getattr(c10d, name) is original for name, original in originals.items())
    assert dist.broadcast_object_list is originals["broadcast_object_list"]
    fabric.close()


def test_what_is_replaced_is_put_back() -> None:
    with Ranks(1, put_back) as ranks:
        ranks.hear(0)


class NoVendor(CpuPlatform):
    """A machine that says it has CUDA, as far as choosing goes."""

    name = "cuda"
    default_backend = "nccl"


def test_a_device_platform_without_its_library_is_refused_in_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the library")
    with pytest.raises(ConfigError) as refused:
        make_fabric(ElasticConfig(), 0, 1, 0, "run", b"secret", dist.HashStore, platform=NoVendor())
    assert "--elastic-comm gloo" in str(refused.value)


def sources() -> list[tuple[str, str]]:
    """(version, distributed_c10d.py) of the installed torch and of wheels in ELASTIC_WHEELS."""
    found: list[tuple[str, str]] = [(str(torch.__version__), Path(c10d.__file__).read_text(encoding="utf-8"))]
    for wheel in sorted(Path(os.environ.get("ELASTIC_WHEELS", "/nonexistent")).glob("torch-2.*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            found.append((wheel.name, archive.read("torch/distributed/distributed_c10d.py").decode()))
    return found


@pytest.mark.parametrize(("version", "source"), sources(), ids=lambda value: value if len(value) < 80 else "")
def test_replaced_names_exist_and_are_looked_up_where_we_put_them(version: str, source: str) -> None:
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert set(REPLACED) <= set(functions), version
    for caller, name in (("new_group", "_new_group_with_tag"), ("all_gather_object", "_tensor_to_object")):
        called = {
            node.func.id
            for node in ast.walk(functions[caller])
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert name in called, f"{caller} of {version} no longer goes through {name}"
    parameters = {argument.arg for argument in functions["_new_group_with_tag"].args.args}
    assert {"ranks", "timeout", "backend", "group_desc", "sort_ranks"} <= parameters, version
    world = source[source.index("class _World") :]
    for table in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        assert f"def {table}(" in world, f"_World.{table} is gone from {version}"
