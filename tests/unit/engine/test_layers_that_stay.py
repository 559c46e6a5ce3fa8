"""Layers stay where they are if nothing can compute them elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.elastic.config import ElasticConfig
from megatron.elastic.runtime import assembly


def moves(experts: int = 0, refused: str = "", **config: Any) -> bool:
    """Return whether layers move in a job that is ``refused`` with several stages."""

    def refusal(_tensor: int, _parts: int, stages: int) -> str:
        return refused if stages > 1 else ""

    job = SimpleNamespace(
        config=ElasticConfig(**config),
        launch_topology=SimpleNamespace(experts=experts, tensor=2, context=1),
        interface=SimpleNamespace(refusal=refusal),
    )
    return assembly._moves_units(cast(Any, job))


def test_layers_move_unless_something_is_in_the_way() -> None:
    assert moves()


@pytest.mark.parametrize("way", [{"refused": "masks"}, {"experts": 4}, {"policy": "recycle"}, {"migrate_after": -1}])
def test_layers_stay(way: dict[str, Any]) -> None:
    """``refused``: layers of one stage read what further stages do not have, as the masks of a batch."""
    assert not moves(**way)
