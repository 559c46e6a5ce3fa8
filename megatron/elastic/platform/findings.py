"""The result of one check of a machine or a job, as one line for a user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Verdict"]

Verdict = Literal["ok", "missing", "note"]
"""'note': worth knowing, and no fault."""


@dataclass(frozen=True)
class Finding:
    """One check. ``text`` of a missing thing names the fix."""

    verdict: Verdict
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:<8} {self.subject:<14} {self.text}"
