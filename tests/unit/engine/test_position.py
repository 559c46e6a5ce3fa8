"""A rank's number on its node, also where ``--virtual-local-rank`` makes each LOCAL_RANK 0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.elastic.config import ElasticConfig
from megatron.elastic.control import env
from megatron.elastic.runtime import assembly


@pytest.fixture(params=["LOCAL_RANK alone", "--virtual-local-rank"])
def second_of_node_one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of rank 5 where nodes 0 and 1 have four ranks each."""
    virtual = request.param == "--virtual-local-rank"
    monkeypatch.setenv("LOCAL_RANK", "0" if virtual else "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    if virtual:
        monkeypatch.setenv(env.POSITION, "1")
    else:
        monkeypatch.delenv(env.POSITION, raising=False)


@pytest.mark.usefixtures("second_of_node_one")
def test_the_ranks_of_a_node_begin_with_its_first() -> None:
    assert assembly._ranks_of_node(5) == range(4, 8)


@pytest.mark.usefixtures("second_of_node_one")
def test_a_rank_sets_the_clock_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[tuple[str, str]]()

    def unknown(kind: str, device: str, library: str) -> Any:
        opened.append((kind, device))
        return SimpleNamespace(why=lambda: "opened")

    monkeypatch.setattr(assembly, "open_frequency", unknown)
    monkeypatch.setattr(assembly, "Clocks", lambda *_, **__: None)
    assembly._clocks(cast(Any, None), ElasticConfig(frequency="nvml:{local_rank}"), cast(Any, None))
    assert opened == [("nvml", "1")]
