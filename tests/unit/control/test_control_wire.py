"""Slots and the journal: indifferent to garbage, and of one order for all."""

from __future__ import annotations

import os
import struct
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.control import events as ev
from megatron.elastic.control.channel import Credentials
from megatron.elastic.control.exits import ExitReason
from megatron.elastic.control.journal import Journal, JournalForged, Trimmed, trim
from megatron.elastic.control.keys import Keys, LocalStore
from megatron.elastic.control.membership import Activity
from megatron.elastic.control.requests import Drain, SaveCheckpoint
from megatron.elastic.control.signer import Signer
from megatron.elastic.control.slot import SLOT_BYTES, Slot
from megatron.elastic.control.wire import encode

# -- slots ---------------------------------------------------------------------------------


def test_a_slot_shows_the_other_side_the_activity_and_the_error() -> None:
    fd, agent = Slot.create("t")
    worker = Slot(fd)
    assert agent.look().activity == Activity(-1, "launch")
    worker.publish(Activity(7, "reduce", (1, 5)))
    seen = agent.look()
    assert seen.activity == Activity(7, "reduce", (1, 5))
    worker.publish(Activity(7, "reduce", (1, 5)))
    assert agent.look().progress == seen.progress + 1
    assert agent.finished() is None
    worker.finish(3)
    assert agent.finished() == 3
    assert agent.exit_reason() is ExitReason.UNKNOWN
    worker.record_error("x" * SLOT_BYTES + "the end", ExitReason.COMMUNICATION)
    assert agent.exit_reason() is ExitReason.COMMUNICATION
    assert agent.error_text().endswith("the end") and len(agent.error_text()) < SLOT_BYTES
    os.close(fd)


def test_a_phase_that_no_look_met_has_a_usual_time_all_the_same() -> None:
    fd, agent = Slot.create("t")
    worker = Slot(fd)
    worker.publish(Activity(1, "compute"))
    assert agent.look().usual_ns == 0, "it never ended"
    began = time.monotonic_ns()
    worker.publish(Activity(1, "reduce"))
    worker.publish(Activity(2, "compute"))
    worker.publish(Activity(2, "reduce"))  # the agent did not see the phase of step 1
    assert 0 < agent.look().usual_ns <= time.monotonic_ns() - began
    os.close(fd)


def test_a_writer_that_dies_half_way_leaves_the_last_whole_activity() -> None:
    fd, agent = Slot.create("t")
    worker = Slot(fd)
    worker.publish(Activity(1, "a"))
    agent.look()
    os.pwrite(fd, struct.pack("<Q", 99), 8)
    os.pwrite(fd, struct.pack("<q", 12345), 16)
    assert agent.look().activity == Activity(1, "a")
    os.close(fd)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=300), st.integers(0, 400) | st.integers(1900, 2100))
def test_no_bytes_in_a_slot_upset_the_agent(data: bytes, at: int) -> None:
    fd, agent = Slot.create("t")
    os.pwrite(fd, data, at)
    agent.look()
    agent.error_text()
    agent.exit_reason()
    agent.finished()
    os.close(fd)


# -- the journal over a real store -------------------------------------------------------------


CREDENTIALS = Credentials("5e" * 16, "run")
SEAL = Signer(CREDENTIALS).of_launch("first")


@pytest.fixture
def store() -> LocalStore:
    return LocalStore(Keys())


def entry(event: ev.Event, after: str) -> bytes:
    return encode({"after": after, "event": event})


def test_two_writers_see_one_order_and_a_decision_cannot_pass_a_loss(store: LocalStore) -> None:
    one, two = Journal(store, SEAL), Journal(store, SEAL)
    list(one.append(ev.Wanted(Drain())))
    assert [position for position, _ in two.append(ev.NodeLost(1, 0, "gone"))] == [0, 1]
    assert not one.append_next(ev.Decided(1, 0)), "position 1 holds the loss"
    assert two.append_next(ev.Decided(2, 0))
    reader = Journal(store, SEAL)
    seen = [event for _, event in reader.follow(5)]
    assert seen == [ev.Wanted(Drain()), ev.NodeLost(1, 0, "gone"), ev.Decided(2, 0)]
    assert list(reader.follow(0.05)) == []


def test_entries_without_the_seal_are_skipped_by_every_reader(store: LocalStore) -> None:
    forged = entry(ev.JobEnded(0, "forged"), "")
    strangers = Signer(Credentials("e5" * 16, "run")).of_launch("first")
    another_run = Signer(Credentials(CREDENTIALS.secret, "another run")).of_launch("first")
    earlier = Signer(CREDENTIALS).of_launch("an earlier launch")
    store.put("journal/0", b"garbage")
    for position, signer in enumerate((strangers, another_run, earlier), 1):
        store.put(f"journal/{position}", signer.sign(f"journal/{position}", forged))
    store.put("journal/4", SEAL.sign("journal/5", forged))
    store.put("journal/5", SEAL.sign("journal/5", b"[]"))
    journal = Journal(store, SEAL)
    got = list(journal.append(ev.Decided(1, 0)))
    assert got == [*((position, None) for position in range(6)), (6, ev.Decided(1, 0))]
    assert journal.dropped == 6


@pytest.mark.parametrize("tampered", ["removed", "replaced by garbage", "replaced by an older one"])
def test_a_past_that_was_changed_is_noticed_by_each_reader(store: LocalStore, tampered: str) -> None:
    """The second of three entries is changed by one who can write to the store and has seen everything in it."""
    writer, early = Journal(store, SEAL), Journal(store, SEAL)
    for event in (ev.Wanted(SaveCheckpoint()), ev.NodeLost(1, 0, "gone"), ev.Wanted(Drain())):
        list(writer.append(event))
        list(early.follow(1))
    if tampered == "removed":  # and the third moved to its place, as far as that can be done
        store.put("journal/1", store.get("journal/2") or b"")
    elif tampered == "replaced by garbage":
        store.put("journal/1", b"garbage")
    else:
        store.put("journal/1", SEAL.sign("journal/1", entry(ev.Wanted(SaveCheckpoint()), "of another past")))
    late = Journal(store, SEAL)
    with pytest.raises(JournalForged, match=r"entry [12] of the journal"):
        for _ in range(3):
            list(late.follow(1))
    # Who had read it all before goes on, and what one writes that was deceived is not taken.
    deceived = Journal(store, SEAL)
    store.put("journal/2", b"garbage")
    with suppress(JournalForged):
        list(deceived.append(ev.JobEnded(0, "from another past")))
        with pytest.raises(JournalForged):
            list(early.follow(1))


def test_a_snapshot_and_a_floor_that_were_put_back_are_not_believed(store: LocalStore) -> None:
    journal = Journal(store, SEAL)
    for _ in range(8):
        list(journal.append(ev.Wanted(SaveCheckpoint())))
    trim(store, SEAL, 2)
    old = store.get("journal/floor")
    trim(store, SEAL, 6)
    asleep = Journal(store, SEAL)
    with pytest.raises(Trimmed):
        list(asleep.follow(0.01))
    store.put("journal/floor", old or b"")
    asleep.mark = replace(asleep.mark, position=4)
    with pytest.raises(Trimmed):
        list(asleep.append(ev.Wanted(Drain())))
    assert store.get("journal/4") is None
