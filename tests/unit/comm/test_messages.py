"""Messages of ranks beside tensors come as they were sent, or name the rank that sent something else."""

from __future__ import annotations

import os
import pickle
import random
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.comm.errors import BadMessage
from megatron.elastic.comm.messages import decode, encode
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.configuration import Configuration
from megatron.elastic.engine.generation.hardware import Hardware
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.state_catalog import Catalog
from megatron.elastic.engine.transaction.certificates import Keys, Marks
from megatron.elastic.engine.transaction.commit import Contents
from megatron.elastic.engine.transaction.fence import EntryPoint, PhaseEnd
from megatron.elastic.engine.transaction.join import JoinState
from megatron.elastic.engine.transaction.save import Want
from megatron.elastic.plan.model import Grid
from megatron.elastic.state.layout import BlockKey, ParamSpec
from megatron.elastic.state.placement import Copies, Placement
from megatron.elastic.state.record import Rate, StepRecord
from megatron.elastic.state.verify import Fingerprint

KEYS = st.tuples(*[st.integers(0, 1 << 20)] * 3)
MARKS = st.builds(Fingerprint, st.integers(0, 1 << 40), st.text(), st.text(), st.text(), st.text())
SPECS = st.builds(
    lambda name, shape, sharded: ParamSpec(name, shape[0] * shape[1], shape, sharded),
    st.text(),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.booleans(),
)
SAID = {
    "text": (str, st.text()),
    "names": (tuple[str, ...], st.lists(st.text()).map(tuple)),
    "keys": (Keys, st.lists(KEYS).map(tuple)),
    "marks": (Marks, st.tuples(st.dictionaries(KEYS, MARKS), st.dictionaries(KEYS, st.text()))),
    "contents": (Contents, st.tuples(*[st.dictionaries(*[st.integers(0, (1 << 64) - 1)] * 2, max_size=5)] * 2)),
    "catalog": (Catalog, st.dictionaries(KEYS.map(lambda key: key[:2]), st.lists(SPECS).map(tuple))),
    "machine": (Hardware, st.builds(Hardware, st.integers(0, 1 << 60), st.integers(0, 1 << 60))),
    "wants": (tuple[Want, ...], st.lists(st.builds(Want, *[st.integers(0, 1 << 40)] * 5)).map(tuple)),
}


def join_state() -> JoinState:
    """With every kind of value in it, a norm that is not a number included."""
    copies: dict[BlockKey, Copies] = {(unit, 0, 1): Copies(unit % 2, (3, 2)) for unit in range(4)}
    assignment = Assignment.at_launch(LaunchTopology(1, 2, 2, ((0, 3), (3, 6)), Grid(8, 1, 2), 8))
    configuration = Configuration(Placement(copies), assignment)
    spec = ParamSpec("weight", 6, (2, 3), True)
    ended = {
        3: PhaseEnd({"lm loss": (2.5, 16.0)}),
        4: PhaseEnd("done"),
        5: PhaseEnd(failure="no room"),
        6: PhaseEnd(False),
    }
    record = StepRecord(
        7, denominator=2, rates=(Rate(1e-3, 0.1),), grad_norm=float("nan"), placement=configuration.digest
    )
    return JoinState(
        {(0, 0): (spec,)},
        Hardware(1, 2),
        configuration,
        configuration,
        record.to_json(),
        EntryPoint(2, True, 7, ended, {1: "why"}),
        False,
        True,
        ("lm loss",),
        '{"n": 123456789012345678901234567890}',
    )


@pytest.mark.parametrize("what", SAID)
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_what_is_said_is_what_is_heard(what: str, data: st.DataObject) -> None:
    kind, values = SAID[what]
    value = data.draw(values)
    assert decode(kind, encode(value), 3) == value


def test_a_welcome_comes_whole() -> None:
    said = join_state()
    heard = decode(JoinState, encode(said), 0)
    assert (
        repr(heard) == repr(said)
        and heard.configuration.digest == said.configuration.digest
        and heard.record == said.record
    )
    assert heard.record.to_json() == said.record_text, "also where a number of floating point was given as an integer"
    assert heard.history().of(heard.record) == said.configuration


@pytest.mark.parametrize("what", SAID)
@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=200), st.randoms(use_true_random=False))
def test_anything_else_is_an_error_that_names_the_rank(what: str, noise: bytes, draw: random.Random) -> None:
    kind, _ = SAID[what]
    damaged = bytearray(encode(join_state()))
    damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    with pytest.raises(BadMessage, match="rank 3 sent not a"):
        decode(kind, encode({"a": noise}), 3)
    for text, expected in ((noise, kind), (bytes(damaged), JoinState)):
        with suppress(BadMessage):  # or, by chance, a message of the type
            decode(expected, text, 3)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("what", [*SAID, "welcome"])
def test_nothing_that_a_peer_sends_is_run(tmp_path: Path, what: str) -> None:
    kind = SAID[what][0] if what in SAID else JoinState
    with pytest.raises(BadMessage):
        decode(kind, pickle.dumps(Evil(tmp_path / "made")), 3)
    assert not (tmp_path / "made").exists()


def test_no_module_of_ours_unpickles() -> None:
    """Megatron's own collectives of objects are not ours; they go over links that the secret authenticates."""
    root = Path(__file__).resolve().parents[3] / "megatron" / "elastic"
    calls = (
        "pickle.load",
        "all_gather_object(",
        "recv_object_list(",
        "broadcast_object_list(",
        "gather_object(",
        "Unpickler",
        "torch.load(",
        "marshal.load",
    )
    found = {
        f"{path.relative_to(root)}: {call}"
        for path in root.rglob("*.py")
        for call in calls
        for line in path.read_text().splitlines()
        if call in line and "def " not in line
    }
    assert not found, "comm/messages.py says things between ranks"
