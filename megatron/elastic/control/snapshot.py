"""The state that the journal's entries lead to, as one JSON text: kept so that the entries can be dropped."""

from __future__ import annotations

import msgspec

from megatron.elastic.control.failures import Failures
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.wire import Codec, ProtocolError, encode

__all__ = ["dump", "restore"]


class _State(msgspec.Struct, forbid_unknown_fields=True):
    generations: Generations
    failures: Failures
    history: JobHistory


_STATE: Codec[_State] = Codec(_State)


def dump(generations: Generations, failures: Failures, history: JobHistory) -> bytes:
    """All as text. Later changes of any do not show in it."""
    return encode(_State(generations, failures, history))


def restore(generations: Generations, failures: Failures, history: JobHistory, text: bytes) -> None:
    """Set all to what :func:`dump` was given. Raises :class:`ProtocolError` and changes none for any other text.

    The nodes and the mapping that holds them keep their identity: other parts of the agent hold references to them.
    """
    found = _STATE.decode(text)
    nodes = generations.nodes
    if found.generations.nodes.keys() != nodes.keys():
        raise ProtocolError(f"a snapshot of nodes {[*found.generations.nodes]}, but the job has {[*nodes]}")
    for number, node in nodes.items():
        _assign(node, found.generations.nodes[number])
    found.generations.nodes = nodes
    _assign(generations, found.generations)
    generations.standings_changed()
    _assign(failures, found.failures)
    _assign(history, found.history)


def _assign(target: msgspec.Struct, source: msgspec.Struct) -> None:
    for name in target.__struct_fields__:
        setattr(target, name, getattr(source, name))
