"""Every type of message: an exact inverse of its bytes, and no bytes that raise anything but ``ProtocolError``."""

from __future__ import annotations

import json
import os
import struct
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.comm.address import Address
from megatron.elastic.control.events import Entry, Event, Reported
from megatron.elastic.control.journal import _ENTRY, _FLOORS, _Entry, _Floor
from megatron.elastic.control.membership import Decision, Loss
from megatron.elastic.control.messages import FROM_WORKER, TO_WORKER, Ask, FromWorker, GiveUp, Hello, ToWorker
from megatron.elastic.control.requests import JOB_REQUESTS, JobRequest, Pending, Request
from megatron.elastic.control.slot import Slot
from megatron.elastic.control.snapshot import _STATE, _State
from megatron.elastic.control.suspicion import Idle
from megatron.elastic.control.wire import Codec, FrameReader, ProtocolError, encode, frame, printable
from megatron.elastic.launch.agent.node_leases import _LEASE, _Lease
from megatron.elastic.launch.agent.own_events import _SAID, _Said
from megatron.elastic.launch.agent.presence import _INTRODUCTIONS, _LISTENERS, _Introduction, _Listener
from megatron.elastic.launch.agent.rendezvous import _CARDS, _LAUNCHES, _Card, _Launch
from tests.unit.control.struct_values import values

EVENTS: Codec[Event] = Codec(Event)
PROTOCOL: dict[str, tuple[Any, Codec[Any]]] = {
    "events": (Event, EVENTS),
    "journal entries": (_Entry, _ENTRY),
    "floor of the journal": (_Floor, _FLOORS),
    "snapshots": (_State, _STATE),
    "worker to agent": (FromWorker, FROM_WORKER),
    "agent to worker": (ToWorker, TO_WORKER),
    "requests of ctl": (JobRequest, JOB_REQUESTS),
    "leases": (_Lease, _LEASE),
    "listener": (_Listener, _LISTENERS),
    "introductions": (_Introduction, _INTRODUCTIONS),
    "said to the first agent": (_Said, _SAID),
    "cards": (_Card, _CARDS),
    "launches": (_Launch, _LAUNCHES),
}
DRAWN = {name: values(kind) for name, (kind, _) in PROTOCOL.items()}
every = pytest.mark.parametrize("name", PROTOCOL)


@every
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_message_is_an_exact_inverse_of_its_bytes(name: str, data: st.DataObject) -> None:
    codec, message = PROTOCOL[name][1], data.draw(DRAWN[name])
    text = encode(message)
    again = codec.decode(text)
    assert again == message and type(again) is type(message)
    if name != "snapshots":  # it holds sets
        assert encode(again) == text


@every
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_a_message_and_never_anything_else(name: str, data: st.DataObject) -> None:
    codec, text = PROTOCOL[name][1], bytearray(encode(data.draw(DRAWN[name])))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        what = data.draw(st.sampled_from(["insert", "cut", "replace"]))
        if what == "cut":
            del text[at : at + data.draw(st.integers(1, 5))]
        else:
            text[at : at + (what == "replace")] = data.draw(st.binary(max_size=3) | st.sampled_from([b"9" * 30, b"["]))
    with suppress(ProtocolError):
        again = codec.decode(bytes(text))
        assert codec.decode(encode(again)) == again


@every
@settings(max_examples=25, deadline=None)
@given(data=st.binary(max_size=64) | st.text(max_size=32).map(str.encode))
def test_arbitrary_bytes_are_a_protocol_error(name: str, data: bytes) -> None:
    codec = PROTOCOL[name][1]
    with pytest.raises(ProtocolError):
        codec.decode(data + b"\0")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@every
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_field_of_another_type_or_name_is_refused_or_a_message(name: str, data: st.DataObject) -> None:
    codec, body = PROTOCOL[name][1], json.loads(encode(data.draw(DRAWN[name])))
    wrong = {**body, data.draw(st.sampled_from([*body, "more"]) if body else st.just("more")): data.draw(JSON)}
    try:
        again = codec.decode(json.dumps(wrong))
    except ProtocolError:
        return
    assert "more" not in wrong and codec.decode(encode(again)) == again


IN_A_REPORT = b'{"t":"promise","generation":0,"address":{"rank":0,"incarnation":0,"host":"h","endpoint":{"a":'


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, IN_A_REPORT + b"[" * 100_000])
def test_deep_nesting_is_a_protocol_error(text: bytes) -> None:
    for _, codec in PROTOCOL.values():
        with pytest.raises(ProtocolError):
            codec.decode(text)


@pytest.mark.parametrize("number", ["1e999", "NaN", "Infinity", f"{1 << 63}", "9" * 5000, "1.0", "true", '"1"'])
def test_a_number_that_does_not_fit_is_a_protocol_error(number: str) -> None:
    with pytest.raises(ProtocolError):
        FROM_WORKER.decode('{"t": "giveup", "why": "", "code": ' + number + "}")
    assert FROM_WORKER.decode('{"t": "giveup", "why": "", "code": -9223372036854775808}') == GiveUp(-(1 << 63), "")


@pytest.mark.parametrize("rank", ["-1", "2147483648", "1.0", "true", "null", '""', '"1"', "9" * 5000, "[]", "1e999"])
def test_what_is_no_rank_is_a_protocol_error(rank: str) -> None:
    with pytest.raises(ProtocolError):
        JOB_REQUESTS.decode('{"job": "j", "command": {"do": "drain", "ranks": [' + rank + "]}}")


# -- decisions -----------------------------------------------------------------------------

ADDRESS = Address(3, 1, "host/0", {"port": 1234, "segment": "mel-1", "list": [1, "x", [2, 3]]}, "rack7/host")


def test_a_decision_is_the_same_bytes_in_every_process() -> None:
    loss = Loss(2, 4, "h", "exit code 1", ("last", "lines é"))
    one = Decision(
        4, {3: ADDRESS, 11: Address(11, 0, "h")}, "loss", (loss,), (3,), ("q", "r"), {3: 0, 11: 1}, (1,), (5, 6)
    )
    codec: Codec[Decision] = Codec(Decision)
    again = codec.decode(encode(one))
    assert again == one and list(again.members) == [3, 11] and again.reports == {3: "q", 11: "r"}
    assert encode(again) == encode(one)


def test_members_out_of_order_or_under_another_rank_are_refused() -> None:
    codec: Codec[Decision] = Codec(Decision)
    text = encode(Decision(1, {2: Address(2, 0, "h"), 10: Address(10, 0, "h")}, "start", (), (), ("",), {2: 0, 10: 0}))
    body = json.loads(text)
    for field in ("members", "text_of"):
        turned = dict(reversed(body[field].items()))
        with pytest.raises(ProtocolError, match="ascending"):
            codec.decode(json.dumps({**body, field: turned}))
    for number in (-1, 1):
        with pytest.raises(ProtocolError, match="a report that is not there"):
            codec.decode(json.dumps({**body, "text_of": {"2": 0, "10": number}}))
    with pytest.raises(ProtocolError, match="another rank"):
        codec.decode(json.dumps({**body, "members": {"3": body["members"]["2"]}}))


# -- frames --------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(values(FromWorker), max_size=5), st.integers(1, 7))
def test_frames_arrive_whatever_the_chunks(messages: list[FromWorker], size: int) -> None:
    data = b"".join(frame(message) for message in messages)
    reader, found = FrameReader(FROM_WORKER), []
    for at in range(0, len(data), size):
        found += list(reader.feed(data[at : at + size]))
    assert found == messages


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64), st.booleans())
def test_garbage_on_a_stream_is_a_protocol_error_at_worst(data: bytes, framed: bool) -> None:
    reader = FrameReader(FROM_WORKER, max_frame=1 << 16)
    with suppress(ProtocolError):
        for message in reader.feed(struct.pack(">I", len(data)) + data if framed else data):
            assert isinstance(message, FromWorker.__args__)


def test_a_frame_beyond_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        list(FrameReader(FROM_WORKER, 100).feed(struct.pack(">I", 101)))


def test_text_that_is_not_unicode_is_a_protocol_error_and_can_be_made_printable() -> None:
    with pytest.raises(ProtocolError, match="Unicode"):
        frame(GiveUp(1, "no file d\udce9but.txt"))
    sent = frame(GiveUp(1, printable("no file d\udce9but.txt")))
    assert FROM_WORKER.decode(sent[4:]) == GiveUp(1, "no file d?but.txt")


# -- the vocabulary --------------------------------------------------------------------------


def test_types_are_told_apart_by_their_names() -> None:
    assert FROM_WORKER.decode(b'{"t":"hello"}') == Hello()
    assert FROM_WORKER.decode(b'{"t":"ask","what":"join","generation":3}') == Ask(Request.JOIN, 3)
    to_worker, no_request = b'{"t":"freeze","generation":3}', b'{"t":"ask","what":"joins","generation":3}'
    for stranger in (to_worker, no_request, b'{"what":"join"}'):
        with pytest.raises(ProtocolError):
            FROM_WORKER.decode(stranger)


def test_pending_requests_as_a_user_reads_them() -> None:
    assert Pending().words() == []
    every_one = Pending(join=True, drain=True, checkpoint=True, reform=True, leave=(4, 5))
    assert every_one.words() == ["checkpoint", "drain", "join", "leave:4,5", "reform"]


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=128, max_size=1200))
def test_a_lease_carries_whatever_a_broken_worker_left_in_its_slot(data: bytes) -> None:
    """Else one worker could make its node look lost."""
    fd, slot = Slot.create("t")
    os.pwrite(fd, data, 16)
    seen = slot.look().activity
    table = {0: (0, Idle(seen.step, seen.phase, seen.waiting_for, 1.5, 30.0))}
    lease = _Lease(1, 0, "agent", 2.5, 7, table)
    assert _LEASE.decode(encode(lease)) == lease
    os.close(fd)


def test_a_report_may_be_large() -> None:
    report = "x" * (1 << 20)
    event = Reported(2, tuple(Entry(msgspec.structs.replace(ADDRESS, rank=rank), report) for rank in range(8)))
    assert EVENTS.decode(encode(event)) == event
