"""Objects in torch's thread-local state are counted as often as they are held, also by a torch that counts none."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref

import pytest
import torch

from megatron.elastic.engine.compute import thread_state


class Held:
    """An object whose end can be seen."""


class Taking:
    """torch's function as it is in 2.11: the state takes over a reference of its caller."""

    def __init__(self) -> None:
        self._real = torch._C._stash_obj_in_tls

    def __call__(self, name: str, value: object) -> None:
        self._real(name, value)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))


@pytest.fixture(params=["counts", "takes over"])
def state(request, monkeypatch):
    """This module over a torch that counts its reference, and over one that does not."""
    thread_state._takes_over.cache_clear()
    newer = not thread_state._takes_over()
    if request.param == "takes over" and newer:
        monkeypatch.setattr(torch._C, "_stash_obj_in_tls", Taking())
    elif request.param == "counts" and not newer:
        pytest.skip("this torch takes references over")
    thread_state._takes_over.cache_clear()
    yield thread_state
    thread_state.put("test", None)
    thread_state._takes_over.cache_clear()


def test_a_held_object_has_one_reference_more(state):
    held = Held()
    before = sys.getrefcount(held)
    for _ in range(5):
        state.put("test", held)
        assert state.get("test") is held
    assert sys.getrefcount(held) == before + 1


def test_a_replaced_object_is_freed(state):
    held = Held()
    ended = weakref.ref(held)
    state.put("test", held)
    del held
    assert ended() is state.get("test")
    state.put("test", None)
    gc.collect()
    assert ended() is None


def test_nothing_is_none(state):
    assert state.get("unknown") is None
