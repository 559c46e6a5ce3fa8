"""A newcomer's first pass reads a batch of its own, checks no loss, and leaves Megatron's arguments as they were."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch.utils.data import Dataset

from megatron.elastic.engine.compute.samples import DatasetSource
from megatron.elastic.mcore.loop import first_pass
from megatron.elastic.mcore.loop.first_pass import rehearsed


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Those of the third rank of a tensor-parallel group."""
    found = Namespace(micro_batch_size=2, check_for_nan_in_loss_and_grad=True, check_for_spiky_loss=True)
    monkeypatch.setattr(first_pass, "get_args", lambda: found)
    monkeypatch.setattr(parallel_state, "_MPU_TENSOR_MODEL_PARALLEL_RANK", 2)
    return found


class Readers(Dataset[torch.Tensor]):
    """Sample n is 10 + n, and the process that read it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([10 + index, os.getpid()])

    def __len__(self) -> int:
        return 16


@pytest.mark.parametrize("reads_data", [True, False])
def test_the_first_samples_are_read_and_no_loss_is_checked(args: Namespace, reads_data: bool) -> None:
    seen = []

    def loss(output: torch.Tensor) -> Any:
        seen.append((args.check_for_nan_in_loss_and_grad, args.check_for_spiky_loss))
        return output.sum(), {}

    def forward_step(batches: Iterator[Any], model: Any) -> Any:
        seen.append((args.check_for_nan_in_loss_and_grad, parallel_state.get_tensor_model_parallel_rank()))
        samples, readers = next(batches).T
        assert (os.getpid() not in readers.tolist()) == reads_data, "only a rank that reads in its steps needs workers"
        return samples.float(), loss

    source = DatasetSource(Readers(), lambda sample: sample, workers=2)
    output, of_output = rehearsed(forward_step, source, reads_data)(iter(()), None)
    assert output.tolist() == [10, 11] and float(of_output(output)[0]) == 21
    assert seen == [(False, 0), (False, False)]
    assert args.check_for_nan_in_loss_and_grad and args.check_for_spiky_loss
    assert parallel_state.get_tensor_model_parallel_rank() == 2
    source.close()


def test_a_script_without_data_gets_an_empty_iterator_and_its_errors_restore_the_arguments(args: Namespace) -> None:
    with pytest.raises(StopIteration):
        rehearsed(lambda batches, model: next(batches), None, True)(iter(()), None)
    assert args.check_for_nan_in_loss_and_grad and parallel_state.get_tensor_model_parallel_rank() == 2
