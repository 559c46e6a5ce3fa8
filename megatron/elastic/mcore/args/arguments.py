"""``--elastic`` and one ``--elastic-*`` flag for every field of :class:`ElasticConfig`.

The flags are derived from the dataclass: name, type and default from the field,
help from the string under it. They are added to Megatron's own parser.
``docs/flags.md`` is generated from the same source:

    python -m megatron.elastic.mcore.args.arguments --write-docs docs/flags.md
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import inspect
import re
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron.elastic.config import ElasticConfig, flag_name, plain_type
from megatron.elastic.mcore.args import yaml_settings
from megatron.elastic.mcore.args.bad_input import BadInput, Faults
from megatron.elastic.mcore.args.muon import uses_muon
from megatron.elastic.mcore.args.written_docs import write_or_print
from megatron.elastic.plan.policies.registry import engine_policies, policy_help

__all__ = ["SWITCH", "add_arguments", "chained", "config_from_args", "docs", "field_help"]

SWITCH = "--elastic"
"""Flag that turns the elastic runtime on; without it Megatron's step is not replaced."""

_SWITCH_HELP = "Run training steps on the elastic engine: the job goes on when ranks fail and when they come back."


_CHOICES: Mapping[str, Callable[[], tuple[str, ...]]] = MappingProxyType({"policy": engine_policies})
"""Settings whose values a registry names."""


def setting_help() -> dict[str, str]:
    """Return setting → its help: the text in :class:`ElasticConfig`, with the text of a registry."""
    texts = field_help(ElasticConfig)
    return {**texts, "policy": f"{texts['policy']} {policy_help()}."}


def field_help(cls: type) -> dict[str, str]:
    """Return field name → the string literal under it, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            texts[statement.target.id] = " ".join(str(following.value.value).split())
    return texts


def _options(field: Field[Any], annotation: Any, text: str) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for one field."""
    kind = plain_type(annotation)
    help_text = text.replace("%", "%%")
    options: dict[str, Any] = {"dest": "elastic_" + field.name, "default": field.default, "help": help_text}
    if kind is bool:
        return {**options, "action": argparse.BooleanOptionalAction if field.default else "store_true"}
    if field.name in _CHOICES:
        return {**options, "choices": list(_CHOICES[field.name]())}
    if get_origin(kind) is Literal:
        return {**options, "choices": list(get_args(kind))}
    return {**options, "type": kind, "metavar": kind.__name__.upper()}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group to ``parser``, once; returns it (Megatron's ``extra_args_provider`` convention)."""
    if any(SWITCH in action.option_strings for action in parser._actions):
        return parser
    group = parser.add_argument_group(title="elastic")
    group.add_argument(SWITCH, action="store_true", help=_SWITCH_HELP)
    hints, texts = get_type_hints(ElasticConfig), setting_help()
    for field in fields(ElasticConfig):
        group.add_argument(flag_name(field.name), **_options(field, hints[field.name], texts[field.name]))
    return parser


ArgsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def chained(provider: ArgsProvider | None, faults: Faults, warn: Callable[[str], object] = print) -> ArgsProvider:
    """Return the script's own ``extra_args_provider`` followed by ours; the parser's errors become :class:`BadInput`.

    Flags that no parser knows are noted in ``faults``, and parsing goes on; other errors are raised. Megatron's
    parser prints its whole usage (over 700 flags) before an error, and exits with 2. ``warn`` is told of settings
    of a YAML file that no flag is named.
    """

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        whole = add_arguments(provider(parser) if provider is not None else parser)
        path = yaml_settings.file_named(sys.argv[1:])
        if path is not None:
            for warning in yaml_settings.take_over(whole, path):
                warn(warning)
        whole.error = functools.partial(  # type: ignore[assignment, method-assign]
            _one_line, whole, faults
        )
        return whole

    return provide


def _one_line(parser: argparse.ArgumentParser, faults: Faults, message: str) -> None:
    text = " ".join(message.split())
    unknown = re.match(r"unrecognized arguments: (.*)", text)
    if unknown is None:
        raise BadInput(text)
    known = [option for action in parser._actions for option in action.option_strings]
    words = unknown.group(1).split()
    for flag in dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--")):
        near = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
        faults.add(
            f"unrecognized argument {flag} "
            + (f"(did you mean {near[0]}?)" if near else "(no flag of this Megatron is like it): leave it out")
        )
    if not any(word.startswith("--") for word in words):
        faults.add(f"{text}: each belongs to no flag; leave it out, or quote values with spaces")


def config_from_args(args: Namespace | Mapping[str, Any]) -> ElasticConfig:
    """Return the settings in parsed arguments. Raises ``ConfigError`` with one line that names the flag.

    Fields that ``args`` lacks (a YAML configuration) keep their defaults; an unknown
    ``elastic_*`` setting is refused, since a misspelt one would be ignored silently. With Muon, copies receive state.
    """
    given = dict(args) if isinstance(args, Mapping) else vars(args)
    names = ElasticConfig.field_names()
    unknown = sorted(key for key in given if key.startswith("elastic_") and key.removeprefix("elastic_") not in names)
    if unknown:
        raise BadInput(f"no such setting: {', '.join(flag_name(key.removeprefix('elastic_')) for key in unknown)}")
    settings = {name: given["elastic_" + name] for name in names if "elastic_" + name in given}
    if uses_muon(given):
        settings["snapshot"] = "state"
    return ElasticConfig(**settings)


# ---------------------------------------------------------------- documentation


def _shown_default(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default is None else f"`{default}`"


def _shown_type(name: str, annotation: Any) -> str:
    kind = plain_type(annotation)
    if name in _CHOICES:
        return " \\| ".join(_CHOICES[name]())
    if kind is bool:
        return "switch"
    return " \\| ".join(get_args(kind)) if get_origin(kind) is Literal else str(kind.__name__)


def docs() -> str:
    """Return the flag reference as Markdown."""
    hints, texts = get_type_hints(ElasticConfig), setting_help()
    lines = [
        "# Flags",
        "",
        "Megatron-LM's own flags keep their meaning; these are added. Generated from",
        "`megatron/elastic/config.py` by `python -m megatron.elastic.mcore.args.arguments --write-docs docs/flags.md`.",
        "",
        "| flag | value | default | |",
        "|---|---|---|---|",
        f"| `{SWITCH}` | switch | off | {_SWITCH_HELP} |",
    ]
    for field in fields(ElasticConfig):
        flag = f"`{flag_name(field.name)}`"
        if field.default is True:
            flag += f", `--no-{flag_name(field.name)[2:]}`"
        kind, default = _shown_type(field.name, hints[field.name]), _shown_default(field.default)
        text = texts[field.name].replace("|", "\\|")
        lines.append(f"| {flag} | {kind} | {default} | {text} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Write the flag reference (``--write-docs PATH``) or print it."""
    return write_or_print("megatron.elastic.mcore.args.arguments", __doc__, docs, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
