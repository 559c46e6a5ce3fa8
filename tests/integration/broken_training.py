"""``pretrain_gpt.py`` with one bug on one rank: ``BROKEN_BUG`` strikes rank ``BROKEN_RANK`` before a certificate.

Each bug does to the state of a running rank what the mistake it is named after would
have left behind, at the instant of the transition ``BROKEN_TRANSITION`` ('recovery',
'migration', 'load'); everything else is the real job.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.transaction.certify import Certifier
from megatron.elastic.engine.transaction.context import Context
from megatron.elastic.engine.transaction.phases import StepBody
from megatron.elastic.state.placement import Copies, Placement

ROOT = Path(__file__).resolve().parents[2]


def _shared(context: Context) -> list[Any]:
    """Copies here of blocks that another rank holds as well, owned ones first."""
    copies = context.view.placement.copies
    ours = [*context.view.owned, *context.view.mirrored]
    return [context.tools.pool.get(block.key) for block in ours if len(copies[block.key].ranks) > 1]


def stale_moments(context: Context) -> None:
    for copy in _shared(context):
        copy.exp_avg.mul_(0.5)


def swapped_blocks(context: Context) -> None:
    by_size: dict[int, Any] = {}
    for copy in _shared(context):
        other = by_size.setdefault(copy.block.numel, copy)
        if other is not copy:
            copy.store, other.store = other.store, copy.store
            copy.lineage, other.lineage = other.lineage, copy.lineage
            return
    raise AssertionError("no two blocks of one size")


def two_owners(context: Context) -> None:
    me = context.tools.fabric.rank
    mirrored = next(block for block in context.view.mirrored)
    copies = dict(context.view.placement.copies)
    held = copies[mirrored.key]
    copies[mirrored.key] = Copies(me, tuple(rank for rank in held.ranks if rank != me))
    context.view = replace(context.view, configuration=replace(context.view.configuration, placement=Placement(copies)))


def no_owner(context: Context) -> None:
    context.tools.pool.drop(context.view.owned[0].key)


def missing_sample(context: Context) -> None:
    _rows(context, lambda rows: rows[1:])


def doubled_sample(context: Context) -> None:
    rows = context.view.plan.grid.global_batch_size
    _rows(context, lambda mine: (*mine, next(row for row in range(rows) if row not in mine)))


def _rows(context: Context, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
    plan, cell = context.view.plan, context.view.cell
    assert cell is not None
    mine = next(piece for piece in plan.pieces if piece.cell == cell.id and piece.first == 0)
    pieces = tuple(replace(piece, rows=change(piece.rows)) if piece is mine else piece for piece in plan.pieces)
    context.view = replace(context.view, plan=replace(plan, pieces=pieces))


def stale_learning_rate(context: Context) -> None:
    rates = tuple(replace(rate, lr=rate.lr * 1.5) for rate in context.record.rates)
    context.record = replace(context.record, rates=rates)


def stale_step_counter(context: Context) -> None:
    context.record = replace(context.record, adam_step=context.record.adam_step - 1)


def other_loss_scale(context: Context) -> None:
    context.record = replace(context.record, loss_scale=context.record.loss_scale * 2)


def parameters_unlike_masters(context: Context) -> None:
    context.tools.arena.parameters.add_(1e-3)


def reused_random_numbers(context: Context) -> None:
    """The seed of another rank: its masks would be drawn again."""
    settings = context.tools.settings
    context.tools = replace(context.tools, settings=replace(settings, seed=settings.seed + 1))


BUGS: dict[str, Callable[[Context], None]] = {
    bug.__name__: bug
    for bug in (
        stale_moments,
        swapped_blocks,
        two_owners,
        no_owner,
        missing_sample,
        doubled_sample,
        stale_learning_rate,
        stale_step_counter,
        other_loss_scale,
        parameters_unlike_masters,
        reused_random_numbers,
    )
}
SKIPPED_GATHER = "skipped_all_gather"
"""The one bug that is in the code rather than in what it leaves behind."""


def _skip_gather() -> None:
    """After a load this rank computes with what its model was made with: it takes part, and keeps nothing of it."""
    made: list[torch.Tensor] = []
    adopt, gather = Engine.adopt_parameters, StepBody.gather

    def adopt_parameters(self: Engine) -> None:
        made.append(self.tools.arena.parameters.clone())
        adopt(self)

    def gather_nothing(self: StepBody, step: int, came: Collection[int] = ()) -> None:
        gather(self, step)
        self._tools.arena.parameters.copy_(made[0])

    Engine.adopt_parameters = adopt_parameters  # type: ignore[method-assign]
    StepBody.gather = gather_nothing  # type: ignore[method-assign]


def arm() -> None:
    """Have the bug of the environment strike in this process, if it is the rank meant."""
    name, when = os.environ["BROKEN_BUG"], os.environ["BROKEN_TRANSITION"]
    if os.environ["RANK"] != os.environ["BROKEN_RANK"]:
        return
    if name == SKIPPED_GATHER:
        _skip_gather()
        return
    original, struck = Certifier.certify, list[str]()

    def certify(self: Certifier, transition: Any, moved: Any, saved: Any = MappingProxyType({})) -> None:
        if transition == when and not struck:
            struck.append(name)
            BUGS[name](self.context)
        original(self, transition, moved, saved)

    Certifier.certify = certify  # type: ignore[method-assign]


if __name__ == "__main__":
    import megatron.elastic.adaptor  # noqa: F401 - it patches Megatron

    arm()
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
