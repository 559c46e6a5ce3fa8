"""State under way lets the bytes of steps pass first, for a while, and never what a vote is to count."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest

from megatron.elastic.engine import movement
from megatron.elastic.engine.movement import _Outgoing
from megatron.elastic.state.transfer import BlockSender


class Sender:
    """Counts what it is asked to send; ``left`` blocks."""

    peer, urgent = 1, False

    def __init__(self, left: int = 5) -> None:
        self.left = left

    def offer(self, blocks: object) -> None:
        pass

    def pump(self) -> bool:
        self.left -= self.left > 0
        return self.left > 0

    def finish(self, version: int) -> None:
        self.left = 0


@contextmanager
def outgoing(sender: Sender, in_the_way: Callable[[], bool]) -> Iterator[_Outgoing]:
    given_up = threading.Event()
    part = _Outgoing(cast(BlockSender, sender), (), given_up.is_set, in_the_way)
    try:
        yield part
    finally:
        given_up.set()
        part.thread.join(10.0)
        assert not part.thread.is_alive()


def until(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10.0
    while not holds() and time.monotonic() < end:
        time.sleep(0.001)
    return holds()


def test_blocks_wait_while_a_step_sends_and_go_on_when_it_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movement, "_GIVE_WAY_SECONDS", 60.0)
    sender, busy = Sender(), threading.Event()
    busy.set()
    with outgoing(sender, busy.is_set):
        time.sleep(0.05)
        assert sender.left == 5
        busy.clear()
        assert until(lambda: sender.left == 0)


def test_a_step_that_waits_for_a_straggler_does_not_hold_them_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movement, "_GIVE_WAY_SECONDS", 0.01)
    sender = Sender()
    with outgoing(sender, lambda: True):
        assert until(lambda: sender.left == 0)


def test_what_a_vote_is_to_count_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movement, "_GIVE_WAY_SECONDS", 60.0)
    sender = Sender()
    sender.urgent = True
    with outgoing(sender, lambda: True):
        assert until(lambda: sender.left == 0)


def test_the_boundary_at_which_they_are_needed_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movement, "_GIVE_WAY_SECONDS", 60.0)
    sender = Sender()
    with outgoing(sender, lambda: True) as part:
        part.finish(3)
        assert sender.left == 0
