"""Trees of dataclasses to JSON and back, by their annotations: the state of a machine as one text.

What stands in the annotations is what is accepted: dataclasses, mappings, lists, tuples,
sets, literals, optional values and plain ones. A field that is added to a dataclass is
part of its snapshot from then on, with nothing to change here.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron.elastic.control.wire import ProtocolError

__all__ = ["from_plain", "restore", "to_plain"]

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """``value`` in what JSON knows; sets in ascending order, so that equal states give equal texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return [to_plain(item) for item in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: Any, plain: Any) -> Any:
    """Inverse of :func:`to_plain` for an annotation. Raises :class:`ProtocolError` for what does not fit it."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return plain
    if origin in (Union, types.UnionType):
        return None if plain is None else from_plain(next(one for one in inner if one is not type(None)), plain)
    if origin is Literal:
        return _checked(plain, plain in inner, kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return kind(**_fields(kind, _checked(plain, isinstance(plain, dict), kind)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        items = _checked(plain, isinstance(plain, dict), kind).items()
        return {_key(inner[0], key): from_plain(inner[1], item) for key, item in items}
    if origin in (list, set, frozenset, tuple):
        items = _checked(plain, isinstance(plain, list), kind)
        if origin is tuple and inner[-1] is not Ellipsis:
            _checked(plain, len(items) == len(inner), kind)
            return tuple(from_plain(one, item) for one, item in zip(inner, items, strict=True))
        return origin(from_plain(inner[0], item) for item in items)
    if kind is float:
        return float(_checked(plain, type(plain) in (int, float), kind))
    return _checked(plain, type(plain) is kind, kind)


def restore(target: Any, plain: Any) -> None:
    """Set every field of the dataclass instance ``target`` to what a snapshot of one like it says.

    What others may hold a reference to keeps its identity: dataclasses in a mapping that has the same keys.
    """
    for name, value in _fields(type(target), plain).items():
        present = getattr(target, name)
        if isinstance(present, Mapping) and present.keys() == value.keys() and all(map(_changeable, present.values())):
            for key, there in value.items():
                for field in dataclasses.fields(there):
                    setattr(present[key], field.name, getattr(there, field.name))
        else:
            setattr(target, name, value)


def _changeable(value: Any) -> bool:
    settings: Any = getattr(type(value), "__dataclass_params__", None)
    return settings is not None and not settings.frozen


def _fields(kind: type, plain: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(plain, dict) or set(names) != set(plain):
        raise ProtocolError(f"no snapshot of a {kind.__name__}")
    return {name: from_plain(hints[name], plain[name]) for name in names}


def _key(kind: Any, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ProtocolError(f"{text!r} is no {kind.__name__}") from None


def _checked(plain: T, fits: bool, kind: Any) -> T:
    if not fits:
        raise ProtocolError(f"{plain!r:.80} is no {kind}")
    return plain
