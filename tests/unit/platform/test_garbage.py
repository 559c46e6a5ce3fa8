"""The search for garbage goes on afterwards as before, whatever happens inside."""

from __future__ import annotations

import gc

import pytest

from megatron.elastic.platform.garbage import garbage_later


@garbage_later()
def searched_inside(error: Exception | None = None) -> bool:
    with garbage_later():
        inner = gc.isenabled()
    if error is not None:
        raise error
    return inner or gc.isenabled()


def test_it_goes_on_afterwards_also_behind_an_error() -> None:
    assert gc.isenabled() and not searched_inside() and gc.isenabled()
    with pytest.raises(KeyError):
        searched_inside(KeyError())
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        assert not searched_inside() and not gc.isenabled()
    finally:
        gc.enable()
