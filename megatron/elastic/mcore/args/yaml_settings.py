"""Settings from Megatron's YAML file (``--yaml-cfg``), as defaults of the flags.

Megatron's own reader takes the file in place of the command line, checks little, and needs a value for each of its
several hundred settings. With ``--elastic`` the file gives values to flags that the command line does not give; the
checks and the rest are those of any other start. Names are those of flags, or in the sections ``language_model`` and
``model_parallel`` those of Megatron's ``TransformerConfig``. The launcher reads flags of ``--elastic`` too, so the
command line alone has those.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from megatron.elastic.mcore.args.bad_input import BadInput

__all__ = ["file_named", "take_over"]

_FLAG = "--yaml-cfg"
_SECTIONS = ("language_model", "model_parallel")
_VARIABLE = re.compile(r"\$\{(.*?)\}")

Settings = dict[str, Any]


def _named(name: str) -> Callable[[Any], Settings]:
    return lambda value: {name: value}


def _not(name: str) -> Callable[[Any], Settings]:
    return lambda value: {name: not value}


def _activation(value: Any) -> Settings:
    known = {"swiglu": {"swiglu": True}, "squaredrelu": {"squared_relu": True}, "gelu": {}}
    if value not in known:
        raise BadInput(f"{_FLAG}: activation_func {value} is not one of {', '.join(known)}")
    return known[value]


def _initialiser(value: Any) -> Settings:
    if value != "xavier_uniform":
        raise BadInput(f"{_FLAG}: init_method {value} is not xavier_uniform")
    return {"init_method_xavier_uniform": True}


_RENAMED: Mapping[str, Callable[[Any], Settings]] = MappingProxyType(
    {
        "num_moe_experts": _named("num_experts"),
        "persist_layer_norm": _not("no_persist_layer_norm"),
        "bias_activation_fusion": _named("bias_gelu_fusion"),
        "activation_func": _activation,
        "init_method": _initialiser,
        "gated_linear_unit": lambda value: {},  # follows from the activation function
    }
)
"""Name of a field of ``TransformerConfig`` that no flag has → the settings that it stands for."""


def file_named(words: Sequence[str]) -> str | None:
    """Return the YAML file that a command line with ``--elastic`` names; ``None``: Megatron reads its own way."""
    found = None
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == _FLAG:
            found = value or (words[number + 1] if number + 1 < len(words) else None)
    return found if "--elastic" in words else None


def take_over(parser: argparse.ArgumentParser, path: str) -> tuple[str, ...]:
    """Give ``parser`` the settings of a file as defaults; return a warning about those that it does not know.

    Raises :class:`BadInput` for a file that cannot be read, and for a value that its flag does not take.
    """
    actions = {action.dest: action for action in parser._actions}
    values, unknown = dict[str, Any](), list[str]()
    for name, value in _flat(_read(path)):
        renamed = name not in actions and name in _RENAMED and value is not None
        found = _RENAMED[name](value) if renamed else {name: value}
        if name.partition("_")[0] == "elastic":
            raise BadInput(f"{_FLAG} {path}: {name}: give --{name.replace('_', '-')} on the command line")
        for dest, setting in found.items():
            if dest in actions and setting is not None:
                values[dest] = _checked(actions[dest], setting)
            elif dest not in actions and setting not in (None, False):
                unknown.append(dest)
    parser.set_defaults(**values)
    actions["yaml_cfg"].dest = "yaml_file"  # else Megatron reads the file in place of the command line
    parser.set_defaults(yaml_cfg=None)
    if not unknown:
        return ()
    near = difflib.get_close_matches(unknown[0], actions, n=1, cutoff=0.8)
    guess = f" (is {unknown[0]} meant to be {near[0]}?)" if near else ""
    return (f"{_FLAG} {path}: no flag of this Megatron is named {', '.join(unknown)}{guess}: without effect",)


def _read(path: str) -> Mapping[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{_FLAG} {path}: {error}") from error
    missing = [name for name in _VARIABLE.findall(text) if name not in os.environ]
    if missing:
        raise BadInput(f"{_FLAG} {path}: the environment has no variable {missing[0]}: export it")
    try:
        found = yaml.safe_load(_VARIABLE.sub(lambda match: os.environ[match[1]], text))
    except yaml.YAMLError as error:
        raise BadInput(f"{_FLAG} {path}: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise BadInput(f"{_FLAG} {path}: expected names with values, as in num_layers: 24")
    return found


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if name in _SECTIONS and isinstance(value, dict):
            yield from value.items()
        else:
            yield name, value


def _checked(action: argparse.Action, value: Any) -> Any:
    """Return ``value`` as the flag's own parser would. Raises :class:`BadInput` if it takes no such value."""
    several = action.nargs in ("+", "*") or (isinstance(action.nargs, int) and action.nargs > 0)
    if several and not isinstance(value, list):
        value = [value]
    flag = action.option_strings[0] if action.option_strings else action.dest
    each = value if isinstance(value, list) else [value]
    switch = action.nargs == 0
    if switch and not isinstance(value, bool):
        raise BadInput(f"{_FLAG}: {action.dest}: {value} is neither true nor false")
    for one in () if switch else each:
        if action.choices is not None and one not in action.choices:
            raise BadInput(f"{_FLAG}: {flag} takes one of {', '.join(map(str, action.choices))}, not {one}")
    if action.type in (int, float) and not switch:
        try:
            each = [action.type(one) for one in each]
        except (TypeError, ValueError) as error:
            raise BadInput(f"{_FLAG}: {flag} takes a number, not {value}") from error
        return each if isinstance(value, list) else each[0]
    return value
