"""The comparison of the flags with which the launchers of a job's nodes were started.

Ranks of different flags would compute different jobs: one ends earlier than the others, or waits in a collective that
the others do not have. So the launchers compare what they pass to the script before any rank starts.

Nodes may differ in paths, since their file systems may, and in flags that concern a node alone (:data:`OF_A_NODE`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from megatron.elastic.config import flag_name

__all__ = ["OF_A_NODE", "unlike"]

OF_A_NODE = frozenset(
    flag_name(field)
    for field in (
        *("domain", "secret_file", "event_log", "dashboard", "metrics", "web_token_file", "webhook_file"),
        *("notices", "health", "inject", "allow_inject", "check"),
    )
)
_LONGEST = 60
"""Characters of a flag's values in a message."""


def unlike(here: Sequence[str], there: Mapping[int, Sequence[str]]) -> str:
    """Return a line that names a flag in which the script's arguments differ between nodes; empty if none does.

    ``here``: those of this node; ``there``: node → its arguments, this node's among them.
    """
    mine = _by_flag(here)
    for node, arguments in sorted(there.items()):
        theirs = _by_flag(arguments)
        for flag in dict.fromkeys([*mine, *theirs]):
            if flag not in OF_A_NODE and _differ(mine.get(flag), theirs.get(flag)):
                other, own = _text(flag, theirs.get(flag)), _text(flag, mine.get(flag))
                return f"node {node} was started {other}, this one {own}: give all nodes the same flags"
    return ""


def _by_flag(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return flag → its values; those before the first flag belong to the empty one. The last of several counts."""
    found: dict[str, list[str]] = {}
    flag = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            flag = name.replace("_", "-")
            found[flag] = [value] if equals else []
        else:
            found.setdefault(flag, []).append(argument)
    return found


def _differ(one: Sequence[str] | None, other: Sequence[str] | None) -> bool:
    if one is None or other is None:
        return one is not other
    return any(a != b and not ("/" in (a or "") and "/" in (b or "")) for a, b in zip_longest(one, other))


def _text(flag: str, values: Sequence[str] | None) -> str:
    if values is None:
        return f"without {flag}"
    text = " ".join([flag, *values]).strip()
    return f"with {text if len(text) <= _LONGEST else text[:_LONGEST] + '…'}"
