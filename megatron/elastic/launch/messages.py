"""The launcher's own lines on the console."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

__all__ = ["say"]


def say(text: str, lines: Sequence[str] = ()) -> None:
    """One line of the launcher's own, with others indented below.

    Written at once, so that agents do not mix; a console that is gone does not end the job.
    """
    body = "".join(f"    | {line}\n" for line in lines)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"[launch] {text}\n{body}")
        sys.stderr.flush()
