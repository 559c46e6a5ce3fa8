"""A save of this process gets its results without a further process, and never those of another save."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest
from megatron.training import global_vars

from megatron.elastic.mcore.checkpoint.save_queue import make_own_queue, make_results_queue


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager_is_started_only_if_another_process_writes(
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    started: list[tuple[object, ...]] = []
    replaced = make_results_queue(lambda *given: started.append(given))
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(async_save=asynchronous))
    found = replaced("spawn")
    assert started == ([("spawn",)] if asynchronous else [])
    assert asynchronous or isinstance(found, queue.Queue)


def test_results_of_a_void_save_do_not_reach_the_next() -> None:
    replaced = make_own_queue(lambda *_: pytest.fail("a manager is started"))
    replaced("spawn").put((0, "written"))
    with pytest.raises(queue.Empty):
        replaced("spawn").get_nowait()


def test_without_arguments_megatron_core_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)
    assert make_results_queue(lambda: "a manager's")() == "a manager's"
