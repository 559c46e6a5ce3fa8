"""The outcome of the history checker for one launch: broken rules, and figures of its steps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from tools.history.lines import Line

__all__ = ["Rules", "Verdict", "Violation", "facts_of"]


@dataclass(frozen=True)
class Rules:
    """The rules that depend on the job."""

    exact: bool = False
    """``--elastic-exact``."""
    state_mode: bool = False
    """``--elastic-snapshot state``: a loss may take survivors back by one step."""
    running: bool = False
    """The job has not ended yet."""


@dataclass(frozen=True)
class Violation:
    """A broken rule, and the lines that show it."""

    rule: str
    text: str
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        places = ", ".join(map(str, self.lines[:6])) + (", ..." if len(self.lines) > 6 else "")
        return f"{self.rule}: {self.text} ({places})"


@dataclass
class Verdict:
    """The outcome for one launch."""

    violations: list[Violation] = field(default_factory=list)
    facts: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """Step → samples, ledger, norm, skipped of its newest commit."""
    generations: int = 0
    lives: int = 0
    losses: int = 0
    replaced: int = 0
    """Records of votes that only lost ranks knew, and that another took the place of."""
    computed_again: int = 0
    """Steps that were committed before the job went back to a checkpoint."""
    left_out: int = 0
    """Samples that a policy left out and said so."""
    unended: list[str] = field(default_factory=list)
    """Incarnations without an end, of a job that was given up or whose last record they hold: killed last, or hung."""

    @property
    def fingerprint(self) -> str:
        """Hash of the facts of all steps."""
        text = "\n".join(f"{step} {self.facts[step]!r}" for step in sorted(self.facts))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def add(self, rule: str, text: str, *lines: Line) -> None:
        """Note a violation."""
        self.violations.append(Violation(rule, text, lines))


def facts_of(line: Line) -> tuple[Any, ...]:
    """Return samples, ledger, norm and skip of a vote."""
    said = line.fields
    return (*said["samples"], said["ledger"], repr(said["grad_norm"]), bool(said["skipped"]))
