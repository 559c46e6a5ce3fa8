"""Subjects of commits are held to their form; the history from before the rule is left alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.commit_subjects import fault, main, subjects


@pytest.mark.parametrize(
    "subject",
    [
        "comm: fail queued work on close",
        "Add the design",
        "launch, ctl: process requests in order",
        "tests/unit: seed every generator",
        'Revert "comm: fail queued work on close"',
        "engine: " + "x" * 64,
    ],
)
def test_an_imperative_of_72_characters_passes(subject: str) -> None:
    assert fault(subject) is None


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("engine: " + "x" * 65, "73 characters"),
        ("comm: fail queued work on close.", "full stop"),
        ("docs: the kill walk of interleaved pipelines", "'the'"),
        ("Added a test", "'added'"),
        ("engine: adding a test", "'adding'"),
        ("tests: agents that meet over a network have a secret", "'agents'"),
        ("fixes a typo", "'fixes'"),
        ("comm: 3 faults", "a verb"),
    ],
)
def test_anything_else_is_told(subject: str, words: str) -> None:
    assert words in (fault(subject) or "")


def git(folder: Path, *words: str) -> str:
    """Run git in ``folder`` as somebody."""
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def history(tmp_path: Path) -> tuple[Path, str]:
    """A repository of five commits, and the last one from before the rule."""
    folder = tmp_path / "there"
    folder.mkdir()
    git(folder, "init", "-q")
    for subject in ("The old way", "Older still than the rule", "add one", "Adds two", "add three"):
        git(folder, "commit", "-q", "--allow-empty", "-m", subject)
    return folder, git(folder, "rev-parse", "HEAD~3")


def test_commits_since_the_base_are_checked(history: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, base = history
    assert list(subjects(folder, None, base).values()) == ["add three", "Adds two", "add one"]
    assert main(["--base", base], folder) == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert "Adds two" in told and "imperative" in told
    assert main(["HEAD~1..HEAD"], folder) == 0


def test_a_clone_without_the_base_has_its_last_commit_checked(history: tuple[Path, str], tmp_path: Path) -> None:
    folder, base = history
    git(tmp_path, "clone", "-q", "--depth", "2", folder.as_uri(), "shallow")
    assert list(subjects(tmp_path / "shallow", None, base).values()) == ["add three"]
    assert main(["--base", base], tmp_path / "shallow") == 0


def test_without_a_history_there_is_nothing_to_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert main([], tmp_path) == 0


def test_a_range_that_git_does_not_know_is_one_line(
    history: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nothing..HEAD"], history[0]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
