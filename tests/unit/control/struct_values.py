"""Values of any message type, drawn from what its annotations accept."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

from megatron.elastic.comm.address import Address
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.membership import Decision, each_once
from megatron.elastic.control.nodes import Node

__all__ = ["values"]

_MANY = 2


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of ``kind``: a struct, or a union, container or scalar that msgspec knows."""
    return _of(inspect.type_info(kind))


def _of(info: inspect.Type) -> st.SearchStrategy[Any]:  # noqa: C901, PLR0912 - a case for each kind of type
    match info:
        case inspect.StructType(cls=cls) if cls is Decision:
            return _decisions(info)
        case inspect.StructType(cls=cls) if cls is Generations:
            return _generations(info)
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: _of(field.type) for field in fields})
        case inspect.IntType(ge=least, le=most, lt=below):
            return st.integers(least, most if below is None else below - 1)
        case inspect.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case inspect.StrType():
            return st.text(max_size=8)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType(values=choices):
            return st.sampled_from(choices)
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.UnionType(types=types):
            return st.one_of(*map(_of, types))
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(_of, items))
        case inspect.VarTupleType(item_type=item):
            return st.lists(_of(item), max_size=_MANY).map(tuple)
        case inspect.ListType(item_type=item):
            return st.lists(_of(item), max_size=_MANY)
        case inspect.SetType(item_type=item):
            return st.sets(_of(item), max_size=_MANY)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_of(key), _of(value), max_size=_MANY)
    raise NotImplementedError(f"no values of {info}")


@st.composite
def _decisions(draw: st.DrawFn, info: inspect.StructType) -> Decision:
    fields = {field.name: _of(field.type) for field in info.fields}
    members = draw(st.lists(values(Address), max_size=_MANY, unique_by=lambda address: address.rank))
    drawn = {name: draw(each) for name, each in fields.items() if name not in ("members", "texts", "text_of")}
    ordered = {address.rank: address for address in sorted(members, key=lambda address: address.rank)}
    reports = {rank: draw(st.text(max_size=8)) for rank in ordered if draw(st.booleans())}
    texts, text_of = each_once(reports)
    return Decision(**drawn, members=ordered, texts=texts, text_of=text_of)


@st.composite
def _generations(draw: st.DrawFn, info: inspect.StructType) -> Generations:
    """Nodes hold the ranks 0 … n−1 once each, and every rank has a state."""
    fields = {field.name: field.type for field in info.fields}
    counts = draw(st.lists(st.integers(1, _MANY), max_size=_MANY))
    nodes = {n: draw(values(Node)) for n in range(len(counts))}
    for n, node in nodes.items():
        node.ranks = tuple(range(sum(counts[:n]), sum(counts[: n + 1])))
    states = fields["ranks"]
    assert isinstance(states, inspect.DictType)
    ranks = {rank: draw(_of(states.value_type)) for rank in range(sum(counts))}
    drawn = {name: draw(_of(each)) for name, each in fields.items() if name not in ("nodes", "ranks", "nominal")}
    return Generations(nodes=nodes, ranks=ranks, nominal=draw(st.integers(1, 10)), **drawn)
