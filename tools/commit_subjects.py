"""Checks the subjects of new commits: an optional area, an imperative, at most 72 characters, no full stop.

    python tools/commit_subjects.py             # commits since the recorded base
    python tools/commit_subjects.py main..HEAD  # any range that git understands

The recorded base (:data:`BASE`) is the last commit from before the rule. A shallow clone that does not reach back to it
cannot tell which commits are newer: there the last one alone is checked.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["fault", "main", "subjects"]

ROOT = Path(__file__).resolve().parent.parent
BASE = "37ca92626cf2edf7610b625e551f23c8a29355b6"
LENGTH = 72
AREA = re.compile(r"[\w./,-]+(?: [\w./,-]+)?: ")
# A table: one row a line, which the formatter would break up.
# fmt: off
NOT_IMPERATIVE = frozenset({
    "a", "all", "also", "an", "and", "any", "as", "at", "both", "but", "by", "each", "every", "everybody", "for",
    "from", "how", "i", "if", "in", "it", "its", "many", "most", "no", "nobody", "not", "nothing", "now", "of",
    "on", "one", "only", "or", "our", "so", "some", "somebody", "such", "that", "the", "their", "there", "these",
    "they", "this", "those", "to", "two", "we", "what", "when", "where", "whether", "which", "who", "why", "wip",
    "with", "without",
})
# fmt: on
"""First words of sentences that are about something, rather than saying what the commit does."""
VERBS_LIKE_OTHER_FORMS = frozenset({"bias", "bring", "embed", "feed", "need", "seed", "shed", "speed", "string"})
"""Imperatives that end as participles or third persons do."""


def fault(subject: str) -> str | None:
    """Return the fault of ``subject``, ``None`` if it has none."""
    if subject.startswith(("Merge ", "Revert ")):
        return None
    if len(subject) > LENGTH:
        return f"{len(subject)} characters, {LENGTH} are allowed"
    if subject.endswith("."):
        return "ends with a full stop"
    said = AREA.sub("", subject, count=1) if AREA.match(subject) else subject
    word = said.split(" ", 1)[0].lower()
    if not re.fullmatch(r"[a-z][a-z-]*", word):
        return "does not begin with a verb"
    if word in NOT_IMPERATIVE or (word.endswith(("ed", "ing")) and word not in VERBS_LIKE_OTHER_FORMS):
        return f"does not begin with an imperative, but with {word!r}"
    if re.search(r"[^suis]s$", word) and word not in VERBS_LIKE_OTHER_FORMS:
        return f"does not begin with an imperative, but with {word!r}"
    return None


def git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run git in ``root``."""
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)


def known(root: Path, commit: str) -> bool:
    """Return whether the clone at ``root`` has ``commit``."""
    return git(root, "cat-file", "-e", f"{commit}^{{commit}}").returncode == 0


def subjects(root: Path, commits: str | None, base: str = BASE) -> dict[str, str]:
    """Return abbreviated hash → subject of ``commits``, by default of those since ``base``. Merges are left out.

    Raises ValueError if git does not know the range.
    """
    if not known(root, "HEAD"):
        return {}  # no history: an unpacked archive
    span = [commits] if commits else [f"{base}..HEAD"] if known(root, base) else ["-1", "HEAD"]
    told = git(root, "log", "--no-merges", "--format=%h%x00%s", *span, "--")
    if told.returncode != 0:
        raise ValueError(told.stderr.strip().splitlines()[-1])
    return dict(line.split("\0", 1) for line in told.stdout.splitlines())


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Command line; exit status 1 and a line for each fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commits", nargs="?", help="a range of git (default: since the recorded base)")
    parser.add_argument("--base", default=BASE, help="the last commit that is not checked (default: %(default)s)")
    asked = parser.parse_args(argv)
    try:
        found = subjects(root, asked.commits, asked.base)
    except ValueError as error:
        print(f"commit_subjects: {error}", file=sys.stderr)
        return 1
    wrong = {name: (subject, text) for name, subject in found.items() if (text := fault(subject))}
    for name, (subject, text) in wrong.items():
        print(f"commit {name}: {text}: {subject}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
