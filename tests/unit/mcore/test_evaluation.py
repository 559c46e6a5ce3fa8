"""Where an evaluation begins in its set follows from Megatron's count of validation samples alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from megatron.training import global_vars

from megatron.elastic.mcore.loop.evaluation import batch_size, batches_of, count_evaluated, told_of, validation_sets
from megatron.elastic.mcore.loop.evaluation import test_set as the_test_set
from megatron.elastic.plan.model import Grid

GRID = Grid(8, 2, 2)


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Megatron's arguments: two sets are read in full, after 40 validation samples of an earlier job."""
    given = SimpleNamespace(
        full_validation=True,
        multiple_validation_sets=True,
        dataloader_type="single",
        global_batch_size=8,
        micro_batch_size=2,
        data_parallel_size=2,
        eval_iters=3,
        consumed_valid_samples=40,
        num_workers=0,
        skip_train=False,
    )
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", given)
    return given


def test_each_of_several_sets_is_read_on_where_its_last_evaluation_ended(args: SimpleNamespace) -> None:
    sets = validation_sets([range(13), range(5)], args, GRID, lambda: 40)
    assert isinstance(sets, tuple) and batches_of(sets) == [13, 5]
    first, second = sets
    for passes in range(3):
        assert (first.first(), second.first()) == (passes * 13 * 8, passes * 5 * 8)
        args.consumed_valid_samples += 13 * 8
        assert second.first() == passes * 5 * 8, "the first set is through, the second is not"
        args.consumed_valid_samples += 5 * 8


def test_one_set_is_read_in_full_or_in_the_batches_of_its_flag(args: SimpleNamespace) -> None:
    args.multiple_validation_sets = False
    whole = validation_sets(range(13), args, GRID, lambda: 40)
    args.full_validation = False
    part = validation_sets(range(100), args, GRID, lambda: 40)
    assert not isinstance(whole, tuple) and not isinstance(part, tuple)
    assert (whole.batches, whole.first(), part.batches, part.first()) == (13, 0, 3, 40)


def test_a_batch_that_replicas_cannot_share_is_cut_to_what_they_can(args: SimpleNamespace) -> None:
    """``--decrease-batch-size-if-needed`` lets a batch be no multiple of a micro-batch for each replica."""
    args.global_batch_size = 11
    assert batch_size(args) == 8
    args.eval_global_batch_size = 7
    assert batch_size(args) == 4


def test_without_training_the_set_is_read_from_its_begin(args: SimpleNamespace) -> None:
    """Megatron makes the set no longer than one evaluation then."""
    args.full_validation, args.skip_train = False, True
    alone = validation_sets(range(24), args, GRID, lambda: 40)
    assert not isinstance(alone, tuple)
    assert (alone.batches, alone.first()) == (3, 0)


@pytest.mark.parametrize(
    ("given", "counted"),
    [
        ({}, 2 * 3 * 8),
        ({"consumed_valid_samples": 40}, 40),
        ({"iteration": 0}, 0),
        ({"train_samples": 100}, 0),
        ({"eval_interval": None}, 0),
    ],
)
def test_a_checkpoint_without_evaluations_counts_those_of_the_present_flags(
    given: dict[str, int | None], counted: int
) -> None:
    args = SimpleNamespace(
        iteration=5,
        consumed_valid_samples=0,
        train_samples=None,
        eval_interval=2,
        eval_iters=3,
        global_batch_size=8,
    )
    vars(args).update(given)
    count_evaluated(args)
    assert args.consumed_valid_samples == counted


def test_megatron_is_told_of_the_sets_that_it_evaluates(args: SimpleNamespace) -> None:
    """A test set is one set, in the batches of the flag, whatever the validation sets are."""
    several = validation_sets([range(13), range(5)], args, GRID, lambda: 40)
    tested = the_test_set(range(24), args, GRID)
    args.eval_iters = batches_of(several)
    for sets, told in ((several, (True, [13, 5])), (tested, (False, 3))):
        with told_of(args, sets):
            assert (args.multiple_validation_sets, args.eval_iters) == told
            assert not args.full_validation, "Megatron would broadcast the lengths"
        assert args.full_validation and args.multiple_validation_sets and args.eval_iters == [13, 5]
