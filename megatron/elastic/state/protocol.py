"""The resolution of a step after a loss, as one pure function.

When a generation is frozen, every survivor reports its :class:`Holdings`. The decision
carries all reports. Every process calls :func:`resolve` on the same bytes and acts alike
(docs/design.md §3.5, §3.6):

- a copy at version t that holds the reduced gradient of step t counts as t+1 once
  the vote on that gradient is known, owner or mirror alike;
- recovery goes to the newest version for which every block has a copy among the
  survivors; if some survivor has the record of t+1, that is rolling forward;
- if no survivor has the record, the copies that the vote was to name repeat it. For that every survivor must have the
  gradients of step t under one key, the statistics of all samples must be known, and every block needs such a copy;
- otherwise step t is run again from t, its gradients discarded;
- a copy that was moved, or made anew after a loss, counts as soon as it is complete,
  also before a vote has named it. Its rank *offers* it if it retains every gradient that the
  rank reports. :func:`all_copies` adds it to the copies that were named, or that a repeated vote is to name;
- versions are never mixed: if no version is complete, the missing blocks are named.

Reports are per rank, not per block, since a rank updates its copies together. A report holds the rank's oldest and
newest version and the gradient keys that all of its copies have. Blocks that break the rule (torn by an interrupted
update) are listed.

In ``state`` mode mirrors receive updated blocks instead of replaying. There a copy
also keeps its previous version and can go back to it, so the last step may be lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.record import GradientKey, StepRecord

__all__ = ["NOTHING", "Holdings", "Resolution", "all_copies", "resolve"]

NOTHING = -1
"""Version reported by a rank without copies (a newcomer, a surplus spare)."""


@dataclass(frozen=True)
class Holdings:
    """The copies, gradients and records of one survivor. Copies still being added do not count.

    It does not name the rank: most ranks hold the same of most things, so their reports are equal.
    """

    oldest: int = NOTHING
    newest: int = NOTHING
    """Lowest and highest version of its copies; differ only while an update is under way."""
    gradients: tuple[GradientKey, ...] = ()
    """Keys of steps s such that every copy at a version ≤ s retains that reduced gradient. For a step whose record this
    rank does not know, only the copies that its vote is to name: added ones included, leaving ones excluded."""
    records: tuple[StepRecord, ...] = ()
    statistics: tuple[tuple[GradientKey, tuple[tuple[int, int], ...]], ...] = ()
    """For each key on which this rank was ready to vote: rows ``[start, stop)`` of the global batch whose tokens and
    losses it knows."""
    torn: tuple[BlockKey, ...] = ()
    """Blocks whose update was interrupted; they count as no copy."""
    floor: int | None = None
    """Lowest version to which every copy can go back (``state`` mode keeps the previous one); None: ``newest``."""
    offered: tuple[BlockKey, ...] = ()
    """Blocks whose copies arrived since the vote of the newest of ``records``, which does not name them. Each is at
    a version of this rank's copies, and has the :attr:`gradients` of its other copies."""

    def to_json(self) -> str:
        """Return the text for the membership report."""
        return json.dumps(
            [
                self.oldest,
                self.newest,
                self.gradients,
                [r.to_json() for r in self.records],
                self.statistics,
                self.torn,
                self.floor,
                self.offered,
            ],
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str, record_of: Callable[[str], StepRecord] = StepRecord.from_json) -> Holdings:
        """Inverse of :meth:`to_json`. ``record_of``: a record's text → the record."""
        oldest, newest, gradients, records, statistics, torn, floor, offered = json.loads(text)
        return cls(
            oldest,
            newest,
            tuple(GradientKey(*key) for key in gradients),
            tuple(record_of(record) for record in records),
            tuple((GradientKey(*key), tuple((a, b) for a, b in rows)) for key, rows in statistics),
            tuple((a, b, c) for a, b, c in torn),
            floor,
            tuple((a, b, c) for a, b, c in offered),
        )


@dataclass(frozen=True)
class Resolution:
    """The next action of every survivor.

    ``roll_forward``: bring every copy to ``version`` by ``record`` (committed).
    ``revote``: bring every copy to ``record``'s version, vote again over the
    gradients ``gradient_key``; success commits ``version``, one above the record.
    ``rerun``: every copy to ``version`` by ``record``, discard all gradients of that
    step, compute it again. ``lost``: ``missing`` blocks have no copy at one common
    version; the job goes back to a checkpoint.
    """

    kind: Literal["roll_forward", "revote", "rerun", "lost"]
    version: int
    gradient_key: GradientKey | None = None
    record: StepRecord | None = None
    missing: tuple[BlockKey, ...] = ()
    stale: tuple[int, ...] = ()
    """Ranks whose copies cannot reach the version and must be dropped and added again."""


def all_copies(
    named: Mapping[BlockKey, Sequence[int]], reports: Mapping[int, Holdings], void: Collection[int] = ()
) -> dict[BlockKey, tuple[int, ...]]:
    """Return block → ranks that have a copy: first those ``named`` by a record or a vote, then those that offer one.

    A copy that the vote under way is to name is updated with its rank's other copies as soon as it has arrived: it
    receives gradients, and without them its rank joins no vote. Any other copy is offered only while it has the same
    gradients as they. So the rank's report holds for it too. ``void``: ranks whose copies do not count, named or
    offered.
    """
    copies = {key: tuple(rank for rank in ranks if rank not in void) for key, ranks in named.items()}
    for rank in sorted(set(reports) - set(void)):
        for key in reports[rank].offered:
            if rank not in copies[key]:
                copies[key] = (*copies[key], rank)
    return copies


def resolve(
    reports: Mapping[int, Holdings],
    needed: Mapping[BlockKey, Sequence[int]],
    rows: Callable[[StepRecord], int],
    again: Mapping[BlockKey, Sequence[int]] | None,
) -> Resolution:
    """Apply the rules. Pure; raises ``ValueError`` on two different records of one version.

    ``needed``: block → ranks that had a copy (lost ones included). ``rows``: size of the batch of the step after a
    record. ``again``: the copies that the vote under way was to name, ``None`` if survivors do not agree on that.
    """
    records = _records(reports)
    lost_at: dict[int, tuple[BlockKey, ...]] = {}
    for version in sorted(records, reverse=True):
        able = {rank for rank, held in reports.items() if _reaches(held, version, records)}
        lost_at[version] = _without_copy(needed, reports, able)
        if not lost_at[version]:
            votable = again is not None and not _without_copy(again, reports, able)
            return _continue_from(version, records, reports, able, rows(records[version]) if votable else None)
    if not records:
        return Resolution("lost", NOTHING, missing=tuple(sorted(needed)))
    newest = max(records)
    return Resolution("lost", newest, missing=lost_at[newest])


def _records(reports: Mapping[int, Holdings]) -> dict[int, StepRecord]:
    records: dict[int, StepRecord] = {}
    for rank, held in reports.items():
        for record in held.records:
            known = records.setdefault(record.version, record)
            if known.undone < record.undone:
                records[record.version] = record
            elif known.undone == record.undone and known != record:
                raise ValueError(f"two different records of version {record.version} (rank {rank})")
    return records


def _reaches(held: Holdings, version: int, records: Mapping[int, StepRecord]) -> bool:
    """Return whether all copies of a rank can be brought to exactly ``version`` with the known records."""
    if held.newest == NOTHING:
        return False
    if held.newest > version and (held.floor is None or held.floor > version):
        return False
    for step in range(held.oldest, version):
        record = records.get(step + 1)
        if record is None or not (record.skipped or record.gradient in held.gradients):
            return False
    return True


def _without_copy(
    needed: Mapping[BlockKey, Sequence[int]], reports: Mapping[int, Holdings], able: set[int]
) -> tuple[BlockKey, ...]:
    torn = {(rank, key) for rank in able for key in reports[rank].torn}
    covered: dict[tuple[int, ...], bool] = {}
    missing = []
    for key, ranks in needed.items():
        if torn:
            found = any(rank in able and (rank, key) not in torn for rank in ranks)
        else:
            found = covered.setdefault(tuple(ranks), any(rank in able for rank in ranks))
        if not found:
            missing.append(key)
    return tuple(sorted(missing))


def _continue_from(
    version: int, records: Mapping[int, StepRecord], reports: Mapping[int, Holdings], able: set[int], rows: int | None
) -> Resolution:
    """Return the resolution at ``version``. ``rows``: size of the batch if a vote could be repeated, else None."""
    record = records[version]
    holding = {rank: held for rank, held in reports.items() if held.newest != NOTHING}
    stale = tuple(sorted(set(holding) - able))
    key = None if rows is None else _votable(version, reports.values(), rows)
    if key is not None and not stale:
        return Resolution("revote", version + 1, key, record)
    behind = any(held.oldest < version or all(r.version != version for r in held.records) for held in holding.values())
    if behind and not stale:
        return Resolution("roll_forward", version, record.gradient, record)
    return Resolution("rerun", version, None, record, stale=stale)


def _votable(version: int, survivors: Collection[Holdings], rows: int) -> GradientKey | None:
    """Return the newest key of step ``version`` on which every survivor was ready to vote, with all statistics."""
    keys = [{key for key, _ in held.statistics if key.step == version and key in held.gradients} for held in survivors]
    for key in sorted(set.intersection(*keys) if keys else (), reverse=True):
        intervals = [span for held in survivors for k, spans in held.statistics if k == key for span in spans]
        if _covers(intervals, rows):
            return key
    return None


def _covers(intervals: Iterable[tuple[int, int]], rows: int) -> bool:
    reached = 0
    for start, stop in sorted(intervals):
        if start > reached:
            return False
        reached = max(reached, stop)
    return reached >= rows
