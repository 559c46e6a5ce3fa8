"""A checkpoint whose index lacks a part, or whose file is too short for one, is told from a whole one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from megatron.elastic.mcore.checkpoint.completeness import require_whole


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two tensors and an object."""
    state = {"weight": torch.ones(4, 3), "bias": torch.ones(3), "step": {"number": 7}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    return tmp_path


def edit(folder: Path, change: Callable[[Metadata], None]) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def test_a_whole_one_passes(saved: Path) -> None:
    require_whole(saved)


@pytest.mark.parametrize("name", ["weight", "step.number"])
def test_a_part_without_a_place_is_named(saved: Path, name: str) -> None:
    def forget(index: Metadata) -> None:
        index.storage_data = {part: place for part, place in index.storage_data.items() if part.fqn != name}

    edit(saved, forget)
    with pytest.raises(OSError, match=f"has no {name}"):
        require_whole(saved)


def test_a_file_that_ends_before_its_parts_is_noticed(saved: Path) -> None:
    (file,) = saved.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(OSError, match="has no"):
        require_whole(saved)
