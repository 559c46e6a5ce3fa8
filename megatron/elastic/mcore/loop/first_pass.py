"""The user's ``forward_step_func`` as a newcomer rehearses it (:mod:`~megatron.elastic.runtime.warm_up`).

The rank has no peers yet, so no other rank sends it a batch: it reads one itself, of the first samples of
the data, as the first rank of a tensor-parallel group does. Its loss comes from values that other ranks
would have written, and may be anything, so it is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.training import get_args

from megatron.elastic.engine.compute.model_interface import ForwardStep
from megatron.elastic.engine.compute.samples import SampleSource, StepAddress
from megatron.elastic.mcore.parallel_state.stage import as_first_of_tensor_group
from megatron.elastic.plan.model import Piece

__all__ = ["rehearsed"]

_CHECKS = ("check_for_nan_in_loss_and_grad", "check_for_spiky_loss")


def rehearsed(forward_step: ForwardStep, source: SampleSource | None, reads_data: bool) -> ForwardStep:
    """Return ``forward_step`` on a micro-batch of ``source``, whichever iterator it is given.

    ``reads_data``: whether this rank will read batches in its steps too. Then loader workers read this one, so that
    they are there before the first step.
    """

    def step(_: Iterator[Any], model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        with _unchecked():
            output, loss = forward_step(_first_batch(source, reads_data), model)
        return output, lambda result: _run_unchecked(loss, result)

    return step


def _first_batch(source: SampleSource | None, read_ahead: bool) -> Iterator[Any]:
    if source is None:
        return iter(())
    rows = get_args().micro_batch_size
    piece = Piece(0, 0, 0, 1, tuple(range(rows)))
    source.plan((piece,) if read_ahead else ())
    return source.begin(StepAddress(0, rows))(piece)


def _run_unchecked(loss: Callable[[torch.Tensor], Any], output: torch.Tensor) -> Any:
    with _unchecked():
        return loss(output)


@contextmanager
def _unchecked() -> Iterator[None]:
    """Show Megatron the first rank of the tensor-parallel group, and arguments that check no loss."""
    args = get_args()
    before = {name: getattr(args, name) for name in _CHECKS if hasattr(args, name)}
    vars(args).update(dict.fromkeys(before, False))
    try:
        with as_first_of_tensor_group():
            yield
    finally:
        vars(args).update(before)
