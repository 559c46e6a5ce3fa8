"""A save is planned over empty tensors; their values arrive later and reach exactly what this rank writes."""

from __future__ import annotations

import io
import queue
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.elastic.engine.compute.model_interface import UnitParameter
from megatron.elastic.engine.transaction.save import Want
from megatron.elastic.mcore.checkpoint.content import Content
from megatron.elastic.mcore.checkpoint.launch_stage import LaunchStage
from megatron.elastic.mcore.checkpoint.writing import write_file
from megatron.elastic.state.layout import ParamSpec
from megatron.elastic.state.manifest import hash_of

TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def sharded(name: str, data: torch.Tensor, replica: int = 0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(name, data, replica_id=replica)


@settings(deadline=None)
@given(rows=st.integers(1, 6), columns=st.integers(1, 6), dtype=TYPES, seed=st.integers(0, 99), data=st.data())
def test_every_view_of_a_registered_tensor_receives_its_own_elements(
    rows: int, columns: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    """Also a transposed one, or some of its rows: Megatron splits and permutes what it writes."""
    registered = torch.empty(rows, columns, dtype=dtype)
    values = torch.randn(rows * columns, generator=torch.Generator().manual_seed(seed))
    first = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(first + 1, rows))
    views = {"whole": lambda t: t, "turned": lambda t: t.t(), "cut": lambda t: t[first:end]}
    want, content = Want(3, 0, 10, 10 + rows * columns, 0), Content()
    content.register(registered, want)
    state = {name: sharded(name, view(registered)) for name, view in views.items()}
    content.detach(state)
    assert content.wants == (want,)
    content.deliver(want, values)
    expected = values.reshape(rows, columns)
    for name, view in views.items():
        found = state[name].data
        assert found.dtype == dtype and found.untyped_storage().data_ptr() != registered.untyped_storage().data_ptr()
        assert torch.equal(found, view(expected).to(dtype)), name


def test_tensors_that_another_rank_writes_are_neither_wanted_nor_allocated() -> None:
    mine, theirs, buffer = torch.empty(4), torch.empty(4), torch.arange(3.0)
    content = Content()
    content.register(mine, Want(0, 0, 0, 4, 0))
    content.register(theirs, Want(1, 0, 0, 4, 0))
    state = {"mine": sharded("mine", mine), "theirs": sharded("theirs", theirs, replica=1), "b": sharded("b", buffer)}
    content.detach(state)
    assert content.wants == (Want(0, 0, 0, 4, 0),)
    assert state["theirs"].data is theirs and state["mine"].data is not mine
    buffer.zero_()
    assert state["b"].data.tolist() == [0.0, 1.0, 2.0], "values that are no state of a unit are copied at once"


def test_parameters_of_a_stage_are_in_the_order_of_megatrons_groups() -> None:
    """Group by group, within a group as the model lists them, however they are spread over units."""
    chunks = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    a, b, c, d = chunks.parameters()

    def of(group: int, parameter: torch.nn.Parameter) -> UnitParameter:
        return UnitParameter(
            ParamSpec(f"{group}", parameter.numel(), tuple(parameter.shape), sharded=False, group=group), parameter
        )

    interface: Any = type("Interface", (), {"chunks": chunks})
    stage = LaunchStage(0, interface, {2: [of(1, d), of(0, c)], 1: [of(1, b), of(0, a)]})
    assert [id(item.parameter) for item in stage.ordered()] == [id(p) for p in (a, c, b, d)]


def bucket(path: Path, tensors: dict[str, torch.Tensor]) -> Any:
    """One file of a save, as Megatron's writer plans it: an object and tensors."""
    text = WriteItem(MetadataIndex("extra"), WriteItemType.BYTE_IO)
    items = [
        (
            WriteItem(MetadataIndex(name), WriteItemType.SHARD, tensor_data=TensorWriteData.__new__(TensorWriteData)),
            tensor,
        )
        for name, tensor in tensors.items()
    ]
    return path, path.name, ([(text, io.BytesIO(b"some words"))], items)


def test_the_file_is_megatrons_to_the_byte_and_hashed_without_being_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7, dtype=torch.bfloat16)}
    ours, theirs = tmp_path / "__0_0.distcp", tmp_path / "theirs" / "__0_0.distcp"
    theirs.parent.mkdir()
    transforms = [_StorageWriterTransforms()]
    results, found = write_file(transforms, bucket(ours, tensors))
    queued: queue.Queue[Any] = queue.Queue()
    FileSystemWriterAsync.write_preloaded_data(transforms, 0, bucket(theirs, tensors), queued, None, use_fsync=False)
    assert ours.read_bytes() == theirs.read_bytes()
    assert [(each.index, each.storage_data.offset) for each in queued.get()[1]] == [
        (each.index, each.storage_data.offset) for each in results
    ]
    assert found == hash_of(ours)
    for result in results:
        where = result.storage_data
        with open(ours, "rb") as file:
            file.seek(where.offset)
            part = io.BytesIO(file.read(where.length))
        name = result.index.fqn
        assert part.read() == b"some words" if name == "extra" else torch.equal(torch.load(part), tensors[name])
    assert {result.index.fqn for result in results} == {"extra", *tensors}
