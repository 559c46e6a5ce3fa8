"""Validation and test sets, in place of Megatron's iterators over them.

The place where an evaluation begins in its set follows from one counter of Megatron's
arguments, ``consumed_valid_samples``, which a newcomer receives with the others. So all
ranks read the same samples, also a rank that joins in the middle of an evaluation.

``--full-validation`` means what it means to Megatron 0.17: an evaluation takes as many global
batches as the set has samples, and reads the set again from its begin when it is through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.training import get_args

from megatron.elastic.engine.compute.samples import DatasetSource, SampleSource
from megatron.elastic.mcore.loop.data import repeated_order, source_for
from megatron.elastic.plan.model import Grid

__all__ = [
    "Evaluated",
    "EvaluatedSet",
    "batch_size",
    "batches_of",
    "count_evaluated",
    "each_of",
    "test_set",
    "told_of",
    "validation_sets",
]


@dataclass(frozen=True)
class EvaluatedSet:
    """A data set that is evaluated in ``batches`` global batches; ``first``: returns the next one's first sample."""

    source: SampleSource | None
    first: Callable[[], int]
    batches: int


Evaluated = EvaluatedSet | tuple[EvaluatedSet, ...]
"""The validation set, or with ``--multiple-validation-sets`` all of them."""


def batch_size(args: Any) -> int:
    """Return the samples of a global batch of an evaluation, in whole micro-batches for all replicas as in Megatron."""
    size = int(getattr(args, "eval_global_batch_size", args.global_batch_size))  # from 0.18 on
    return size - size % int(args.micro_batch_size * args.data_parallel_size)


def count_evaluated(args: Any) -> None:
    """Set the counter for a checkpoint whose job evaluated nothing, as Megatron does.

    Validation goes on where it would be, had the present flags been those of the checkpoint's job.
    """
    if args.iteration > 0 and args.consumed_valid_samples == 0 and args.train_samples is None and args.eval_interval:
        evaluations = args.iteration // args.eval_interval
        args.consumed_valid_samples = evaluations * args.eval_iters * args.global_batch_size


def test_set(dataset: Any, args: Any, grid: Grid) -> EvaluatedSet:
    """Return the test set, which is evaluated once."""
    return EvaluatedSet(source_for(dataset, args, grid), lambda: 0, args.eval_iters)


def validation_sets(datasets: Any, args: Any, grid: Grid, before: Callable[[], int]) -> Evaluated:
    """Return what Megatron's builder made of the validation data.

    ``before``: returns the validation samples that were consumed before this job. Raises ``ValueError`` if a set is
    too small to be read in full.
    """
    if not args.full_validation:
        source = source_for(datasets, args, grid)
        if args.skip_train:  # Megatron sizes the set for one evaluation, and reads it from its begin
            return EvaluatedSet(source, lambda: int(get_args().consumed_valid_samples) - before(), args.eval_iters)
        return EvaluatedSet(source, lambda: int(get_args().consumed_valid_samples), args.eval_iters)
    each = datasets if isinstance(datasets, list) else [datasets]
    size, together = batch_size(args), sum(map(len, each))

    def first(batches: int) -> Callable[[], int]:
        return lambda: (get_args().consumed_valid_samples - before()) // (together * size) * batches * size

    sets = tuple(
        EvaluatedSet(DatasetSource(one, repeated_order(len(one), grid), args.num_workers), first(len(one)), len(one))
        for one in each
    )
    return sets if args.multiple_validation_sets else sets[0]


def each_of(evaluated: Evaluated) -> tuple[EvaluatedSet, ...]:
    """Return the sets of an evaluation, in Megatron's order."""
    return evaluated if isinstance(evaluated, tuple) else (evaluated,)


def batches_of(evaluated: Evaluated) -> int | list[int]:
    """Return the global batches of an evaluation as Megatron's loop counts them: of one set, or of each."""
    return [one.batches for one in evaluated] if isinstance(evaluated, tuple) else evaluated.batches


@contextmanager
def told_of(args: Any, evaluated: Evaluated) -> Iterator[None]:
    """Tell Megatron, inside the context, the sets that it is about to evaluate and their lengths."""
    told = {
        "full_validation": False,
        "multiple_validation_sets": isinstance(evaluated, tuple),
        "eval_iters": batches_of(evaluated),
    }
    before = {name: getattr(args, name) for name in told}
    vars(args).update(told)
    try:
        yield
    finally:
        vars(args).update(before)
