"""A call of a vendor's library that does not return delays its caller by a limited time."""

from __future__ import annotations

import threading
import time

import pytest

from megatron.elastic.comm.vendor.calls import bounded, connected
from megatron.elastic.comm.vendor.library import VendorError, VendorHang, VendorInterrupted


def never() -> bool:
    return False


class Held:
    """A call that begins, returns when it is released, and notes what was given back."""

    def __init__(self, fails: bool = False) -> None:
        self.begun, self.may, self.over = threading.Event(), threading.Event(), threading.Event()
        self.back: list[str | None] = []
        self._fails = fails

    def call(self) -> str:
        self.begun.set()
        assert self.may.wait(30)
        if self._fails:
            raise VendorError("refused")
        return "a communicator"

    def give_back(self, made: str | None) -> None:
        self.back.append(made)
        self.over.set()


def test_a_call_that_returns_gives_its_result_or_its_error() -> None:
    for run in (
        lambda action: bounded(action, 30.0, "call"),
        lambda action: connected(action, 30.0, "call", never, lambda made: pytest.fail("nobody left")),
    ):
        good, bad = Held(), Held(fails=True)
        good.may.set(), bad.may.set()
        assert run(good.call) == "a communicator"
        with pytest.raises(VendorError, match="refused"):
            run(bad.call)


@pytest.mark.parametrize(("fails", "back"), [(False, "a communicator"), (True, None)])
def test_a_caller_that_is_interrupted_goes_on_and_the_call_gives_back_what_it_made(
    fails: bool, back: str | None
) -> None:
    held = Held(fails)
    with pytest.raises(VendorInterrupted):
        connected(held.call, 30.0, "call", held.begun.is_set, held.give_back)
    assert held.back == []
    held.may.set()
    assert held.over.wait(30) and held.back == [back]


def test_a_call_that_is_over_is_not_left_behind_although_its_caller_is_interrupted() -> None:
    held = Held()
    held.may.set()

    def slow_to_look() -> bool:
        time.sleep(0.05)
        return True

    def call() -> str:
        time.sleep(0.02)
        return held.call()

    assert connected(call, 30.0, "call", slow_to_look, held.give_back) == "a communicator" and held.back == []


def test_a_call_that_takes_longer_than_it_may_is_a_hang() -> None:
    held = Held()
    with pytest.raises(VendorHang, match=r"call did not return within 0.1 s"):
        bounded(held.call, 0.1, "call")
    with pytest.raises(VendorHang, match=r"call did not return within 0.1 s"):
        connected(held.call, 0.1, "call", never, held.give_back)
    held.may.set()
    assert held.over.wait(30)
