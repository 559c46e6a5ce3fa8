"""A long evaluation is left between two batches, the same ones on all ranks; a short one is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.elastic.engine.transaction.early_end import EarlyEnd


class Ranks:
    """Sums over two ranks, of which the other one says what this one does, and when batches end."""

    def __init__(self, batch: float) -> None:
        self.now, self.batch, self.asked = 0.0, batch, 0
        self.fabric: Any = SimpleNamespace(alive=(0, 1), sum_over_ranks=self._sum)

    def _sum(self, values: Sequence[float], counts: Sequence[int]) -> tuple[list[float], list[int]]:
        self.asked += 1
        return [2 * value for value in values], [2 * count for count in counts]

    def run(self, batches: int, reasons: Mapping[str, float]) -> tuple[int, str]:
        """Return the batches that are computed, and why it ends; each of ``reasons`` holds from its time on."""
        holds = {name: lambda at=at: self.now >= at for name, at in reasons.items()}
        early = EarlyEnd(self.fabric, lambda: self.now, holds, batches)
        for done in range(batches):
            why = early.reason(done)
            if why:
                return done, why
            self.now += self.batch
        return batches, ""


@pytest.mark.parametrize("batch", [0.01, 1.0, 60.0])
def test_a_long_one_ends_soon_after_a_reason_holds(batch: float) -> None:
    ranks = Ranks(batch)
    done, why = ranks.run(100_000, {"time": float("inf"), "drain": 100.0})
    assert why == "drain"
    assert 100.0 <= done * batch <= 100.0 + 5.0 + 2 * batch, "soon, in seconds or batches"
    assert ranks.asked <= 3 + min(done, done * batch / 4), "and it was asked rarely"


def test_what_is_nearly_done_is_finished() -> None:
    assert Ranks(1.0).run(4, {"drain": 0.0}) == (4, "")
    assert Ranks(1.0).run(104, {"drain": 99.5}) == (104, "")


def test_without_reasons_nothing_is_asked() -> None:
    ranks = Ranks(1.0)
    assert ranks.run(50, {}) == (50, "") and not ranks.asked
