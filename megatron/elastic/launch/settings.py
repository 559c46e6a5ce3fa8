"""The script's ``--elastic-*`` flags, as far as the launcher needs them: read, and passed on all but one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod
from typing import Any, get_type_hints

from megatron.elastic.config import ConfigError, ElasticConfig, flag_name, plain_type

__all__ = ["cell_size", "elastic_settings", "exit_signal", "setup_seconds", "without_webhook"]

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def elastic_settings(arguments: Sequence[str], respawn: bool | None = None) -> ElasticConfig:
    """The :class:`ElasticConfig` in a script's arguments; ``respawn`` overrides.

    Accepts ``--elastic-x V``, ``--elastic-x=V``, underscores for dashes, and for
    switches ``--elastic-x``, ``--no-elastic-x``, ``--elastic-no-x``. Raises
    :class:`ConfigError` for a value of the wrong type; unknown flags are the script's.
    """
    hints = {name: plain_type(hint) for name, hint in get_type_hints(ElasticConfig).items()}
    by_flag = {flag_name(field.name): field.name for field in dataclasses.fields(ElasticConfig)}
    values: dict[str, Any] = {}
    for index, argument in enumerate(arguments):
        flag, equals, given = argument.partition("=")
        flag = flag.replace("_", "-")
        negated = flag.replace("--no-elastic-", "--elastic-").replace("--elastic-no-", "--elastic-")
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        if flag in by_flag and hints[by_flag[flag]] is bool:
            text = given if equals else following if following.lower() in _TRUE + _FALSE else "true"
            values[by_flag[flag]] = text.lower() in _TRUE
        elif flag in by_flag:
            values[by_flag[flag]] = _convert(flag, given if equals else following, hints[by_flag[flag]])
        elif negated != flag and negated in by_flag and hints[by_flag[negated]] is bool:
            values[by_flag[negated]] = False
    if respawn is not None:
        values["respawn"] = respawn
    return ElasticConfig(**values)


def exit_signal(arguments: Sequence[str]) -> str:
    """Return the name in ``--exit-signal`` if the script has ``--exit-signal-handler`` too, else an empty text."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    flags = [word.replace("_", "-") for word in words]
    if "--exit-signal-handler" not in flags or "--exit-signal" not in flags[:-1]:
        return ""
    last = len(flags) - 2 - flags[-2::-1].index("--exit-signal")
    return words[last + 1]


def without_webhook(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return ``arguments`` without ``--elastic-webhook URL``, in every spelling that :func:`elastic_settings` reads.

    Megatron writes all arguments to its log, to TensorBoard and into checkpoints, and the URL may hold a token.
    """
    kept, skip = [], False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        if skip:
            skip = False
        elif flag.replace("_", "-") == flag_name("webhook"):
            skip = not equals
        else:
            kept.append(argument)
    return tuple(kept)


def cell_size(arguments: Sequence[str]) -> int:
    """Return the ranks of a cell, as a script's arguments have them. Raises :class:`ConfigError`.

    They are ``--tensor-model-parallel-size`` × ``--context-parallel-size``, each 1 if not given.
    """
    return prod(_size(wanted, arguments) for wanted in ("--tensor-model-parallel-size", "--context-parallel-size"))


def setup_seconds(arguments: Sequence[str]) -> float:
    """Return ``--distributed-timeout-minutes`` in seconds, 0 if not given. Raises :class:`ConfigError`.

    Users raise it for a set-up that takes long, such as the first building of a large dataset's indices.
    """
    wanted = "--distributed-timeout-minutes"
    given = any(argument.partition("=")[0].replace("_", "-") == wanted for argument in arguments)
    return 60.0 * _size(wanted, arguments) if given else 0.0


def _size(wanted: str, arguments: Sequence[str]) -> int:
    for index, argument in enumerate(arguments):
        flag, equals, given = argument.partition("=")
        if flag.replace("_", "-") == wanted:
            text = given if equals else arguments[index + 1] if index + 1 < len(arguments) else ""
            if not text.isdecimal() or int(text) < 1:
                raise ConfigError(f"{wanted} takes an integer above 0, got {text!r}")
            return int(text)
    return 1


def _convert(flag: str, text: str, hint: Any) -> Any:
    try:
        return hint(text) if hint in (int, float) else text
    except ValueError:
        raise ConfigError(f"{flag} takes {'an integer' if hint is int else 'a number'}, got {text!r}") from None
