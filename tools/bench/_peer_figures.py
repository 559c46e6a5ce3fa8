"""Figures of one peer's run with a fault, from its log: pure functions over committed steps.

Definitions, the same for all contenders:

- The *normal step* is the median time between a rank's commits while nothing has happened.
- *Recovered* is the first commit of each survivor whose attempt began after the fault or in a membership formed after
  it. A survivor is a rank that was not hit; where the peer starts it again, its new process counts. Ranks that the
  contender gives up together with one that was hit are no survivors. The time to recover (MTTR) is that of the slowest
  survivor since the signal, less a normal step.
- The job is *whole* again when every rank that was hit has committed a step in a new process.
- A step is *undone* when a rank had committed it before the fault and commits it again after it. A step is *discarded*
  when all its work is thrown away and its attempt is not repeated within the same step.
- *Samples lost* are those of the committed steps' global batches that were computed by none.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.elastic.observe.events import read_events

__all__ = [
    "Commit",
    "Figures",
    "History",
    "Strike",
    "deviation",
    "figures_of",
    "losses_by_step",
    "normal_step",
    "read_own_log",
    "read_peer_log",
]

WARM_UP = 3
"""Commits of each rank that do not count for the normal step."""


@dataclass(frozen=True)
class Commit:
    """A step as one process committed it. Times are seconds since 1970."""

    rank: int
    life: int
    """Distinguishes the processes of a rank."""
    step: int
    began: float
    wall: float
    rows: int
    """Samples of the global batch that took part."""
    own_rows: int
    loss: float
    """Mean over ``own_rows``."""
    membership: int = 0
    """Number of the membership, where the peer tells it."""


@dataclass(frozen=True)
class History:
    """All that a run logged, commits in the order of their times."""

    commits: tuple[Commit, ...]
    discarded: tuple[tuple[int, float], ...] = ()
    """(rank, when) of attempts that ended with their work thrown away."""

    def until(self, wall: float) -> History:
        """Return the part before ``wall``."""
        commits = tuple(commit for commit in self.commits if commit.wall < wall)
        return History(commits, tuple(entry for entry in self.discarded if entry[1] < wall))


@dataclass(frozen=True)
class Strike:
    """A fault that was injected: when, and the ranks that were hit (none: a coordinator)."""

    wall: float
    ranks: frozenset[int]
    given_up: frozenset[int] = frozenset()
    """Ranks that the contender ends, or leaves idle, since a rank of their replica was hit."""

    def survivors(self, ranks: int) -> frozenset[int]:
        """Return those of ``ranks`` ranks that have to recover."""
        return frozenset(range(ranks)) - self.ranks - self.given_up


@dataclass(frozen=True)
class Figures:
    """Figures of one run. None: it did not happen within the time given."""

    normal_step_s: float
    mttr_s: float | None
    whole_after_s: float | None
    rejoin_stall_s: float | None
    """The longest time between commits of a survivor from its recovery to two steps after whole, less a normal step."""
    steps_undone: int
    steps_discarded: int
    """Attempts thrown away, the most of any rank."""
    rows_before: int
    rows_after: int | None
    """Of the smallest global batch after the fault."""
    rows_lost: int
    throughput_without: float | None
    """Samples a second from the recovery until whole (or the end), over those before; None for fewer than 3 steps."""


def read_peer_log(folder: Path) -> History:
    """Read the logs of a peer's processes (``peers_programs/common.py``). A torn last line is left out."""
    commits, discarded = [], []
    for path in sorted(folder.glob("rank*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if entry["kind"] == "discarded":
                discarded.append((int(entry["rank"]), float(entry["wall"])))
            elif entry["kind"] == "step":
                named = {name: entry[name] for name in ("rank", "step", "began", "wall", "rows", "own_rows", "loss")}
                commits.append(Commit(life=entry["pid"], **named))
    return History(tuple(sorted(commits, key=lambda commit: commit.wall)), tuple(sorted(discarded)))


def read_own_log(folder: Path) -> History:
    """Read the event log of a job of this project: each rank tells of its phases, one rank of the rest of a step."""
    records = read_events(folder)
    steps = {record.fields["step"]: record.fields for record in records if record.kind == "step"}
    commits = []
    for record in records:
        step = steps.get(record.fields["step"]) if record.kind == "phases" else None
        if step is not None:
            first, end = step["samples"]
            commits.append(
                Commit(
                    rank=record.rank,
                    life=record.incarnation,
                    step=record.fields["step"],
                    began=record.wall - step["seconds"],
                    wall=record.wall,
                    rows=end - first if step["computed"] is None else step["computed"],
                    own_rows=1,
                    loss=next(iter(step["losses"].values()), float("nan")),
                    membership=record.generation,
                )
            )
    return History(tuple(sorted(commits, key=lambda commit: commit.wall)))


def normal_step(commits: Sequence[Commit], until: float = float("inf")) -> float:
    """Median seconds between commits of a process before ``until``. Raises ``ValueError`` for too few commits."""
    gaps: list[float] = []
    for own in _by_life(commit for commit in commits if commit.wall < until).values():
        walls = [commit.wall for commit in own[WARM_UP:]]
        gaps += [after - before for before, after in itertools.pairwise(walls)]
    if not gaps:
        raise ValueError("too few steps before the fault to tell the normal step")
    return statistics.median(gaps)


def figures_of(history: History, strike: Strike, ranks: int) -> Figures:
    """Return the figures of a run of ``ranks`` ranks with the fault ``strike``."""
    commits = history.commits
    normal = normal_step(commits, strike.wall)
    before = [commit for commit in commits if commit.wall < strike.wall]
    after = [commit for commit in commits if commit.wall >= strike.wall]
    recovered = _recovered(before, after, strike, ranks)
    whole = _whole(before, after, strike)
    mttr = None if recovered is None else max(c.wall for c in recovered.values()) - strike.wall - normal
    return Figures(
        normal_step_s=normal,
        mttr_s=mttr,
        whole_after_s=None if whole is None else whole - strike.wall,
        rejoin_stall_s=_rejoin_stall(after, recovered, whole, normal),
        steps_undone=_undone(before, after),
        steps_discarded=max(
            Counter(rank for rank, wall in history.discarded if wall >= strike.wall).values(), default=0
        ),
        rows_before=max(commit.rows for commit in before),
        rows_after=min((c.rows for c in after if c.began >= strike.wall), default=None),
        rows_lost=_rows_lost(before, after),
        throughput_without=_throughput(before, after, recovered, whole, normal),
    )


def _by_life(commits: Iterable[Commit]) -> dict[tuple[int, int], list[Commit]]:
    lives: dict[tuple[int, int], list[Commit]] = {}
    for commit in commits:
        lives.setdefault((commit.rank, commit.life), []).append(commit)
    return lives


def _recovered(
    before: Sequence[Commit], after: Sequence[Commit], strike: Strike, ranks: int
) -> dict[int, Commit] | None:
    """The recovering commit of each survivor; None while one has none."""
    membership = max(commit.membership for commit in before)
    found: dict[int, Commit] = {}
    for commit in after:
        if commit.began >= strike.wall or commit.membership > membership:
            found.setdefault(commit.rank, commit)
    survivors = strike.survivors(ranks)
    return {rank: found[rank] for rank in survivors} if survivors <= found.keys() else None


def _whole(before: Sequence[Commit], after: Sequence[Commit], strike: Strike) -> float | None:
    """When every rank that was hit had committed a step in a new process."""
    old = {(commit.rank, commit.life) for commit in before}
    new: dict[int, float] = {}
    for commit in after:
        if commit.rank in strike.ranks and (commit.rank, commit.life) not in old:
            new.setdefault(commit.rank, commit.wall)
    return max(new.values()) if new and new.keys() == strike.ranks else None


def _rejoin_stall(
    after: Sequence[Commit], recovered: Mapping[int, Commit] | None, whole: float | None, normal: float
) -> float | None:
    """None also where survivors were started again: they come back together, so none waits for another."""
    if recovered is None or whole is None or whole <= max(commit.wall for commit in recovered.values()):
        return None
    longest = None
    for rank, first in recovered.items():
        own = [c for c in after if (c.rank, c.life) == (rank, first.life) and c.wall >= first.wall]
        end = next((index for index, commit in enumerate(own) if commit.wall > whole), len(own)) + 2
        walls = [commit.wall for commit in own[:end]]
        gaps = [later - earlier for earlier, later in itertools.pairwise(walls)]
        if gaps:
            longest = max(longest or 0.0, max(gaps) - normal)
    return longest


def _undone(before: Sequence[Commit], after: Sequence[Commit]) -> int:
    last: dict[int, int] = {}
    for commit in before:
        last[commit.rank] = max(last.get(commit.rank, 0), commit.step)
    again: dict[int, set[int]] = {}
    for commit in after:
        if commit.step <= last.get(commit.rank, 0):
            again.setdefault(commit.rank, set()).add(commit.step)
    return max((len(steps) for steps in again.values()), default=0)


def _rows_lost(before: Sequence[Commit], after: Sequence[Commit]) -> int:
    full = max(commit.rows for commit in before)
    rows = {commit.step: commit.rows for commit in after}
    return sum(full - kept for kept in rows.values())


def _throughput(
    before: Sequence[Commit],
    after: Sequence[Commit],
    recovered: Mapping[int, Commit] | None,
    whole: float | None,
    normal: float,
) -> float | None:
    if not recovered:
        return None
    rank, first = next(iter(recovered.items()))
    own = [c for c in after if c.rank == rank and c.wall >= first.wall and (whole is None or c.wall < whole)]
    if len(own) < 4:
        return None
    rate = sum(commit.rows for commit in own[1:]) / (own[-1].wall - own[0].wall)
    return rate / (before[-1].rows / normal)


def losses_by_step(history: History) -> dict[int, float]:
    """Loss of every global batch but the last, from the newest commits of each step.

    The job is ended in the middle of its last step, so not every rank may have told of that one.
    """
    newest: dict[int, dict[int, Commit]] = {}
    last = max((commit.step for commit in history.commits), default=0)
    for commit in history.commits:
        if commit.own_rows and commit.step < last:
            newest.setdefault(commit.step, {})[commit.rank] = commit
    return {
        step: sum(c.loss * c.own_rows for c in own.values()) / sum(c.own_rows for c in own.values())
        for step, own in newest.items()
    }


def deviation(calm: Mapping[int, float], torn: Mapping[int, float], first: int) -> float | None:
    """Largest relative deviation of ``torn`` from ``calm`` from step ``first`` on; None without common steps."""
    common = [step for step in calm if step >= first and step in torn]
    return max((abs(torn[step] - calm[step]) / abs(calm[step]) for step in common), default=None)
