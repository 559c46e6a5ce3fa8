"""A save of this process gets its results without a further process; Megatron's asynchronous save keeps its own."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest
from megatron.training import global_vars

from megatron.elastic.mcore.checkpoint.save_queue import make_results_queue


@pytest.mark.parametrize(
    ("asynchronous", "elastic", "own"),
    [(False, False, True), (True, False, False), (True, True, True), (False, True, True)],
)
def test_a_manager_is_started_only_if_another_process_writes(
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool, elastic: bool, own: bool
) -> None:
    started: list[tuple[object, ...]] = []
    replaced = make_results_queue(lambda *given: started.append(given))
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(async_save=asynchronous, elastic=elastic))
    found = replaced("spawn")
    assert started == ([] if own else [("spawn",)])
    if own:
        found.put((0, "written"))
        assert replaced("fork") is found and replaced().get_nowait() == (0, "written"), "writer and reader share it"
        with pytest.raises(queue.Empty):
            found.get_nowait()


def test_without_arguments_megatron_core_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)
    assert make_results_queue(lambda: "a manager's")() == "a manager's"
