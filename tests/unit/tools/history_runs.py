"""Event logs of jobs that never ran: good histories of random losses and returns, and ways to spoil one.

A history is a list of lines a rank, in the order written, as dictionaries. Time is the number of the line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["SPOILED", "History", "Job", "write"]

BATCH = 8
Line = dict[str, Any]
History = dict[int, list[Line]]


class Job:
    """Some ranks that train by the rules; each method is something that happens to them."""

    def __init__(self, seed: int, ranks: int) -> None:
        self._random = random.Random(seed)
        self.files: History = {rank: [] for rank in range(ranks)}
        self._lives = dict.fromkeys(range(ranks), 0)
        self._living = set(range(ranks))
        self._generation, self._now, self._names = 1, 0, 0
        self._chain: list[str] = ["start"]
        self.cut: set[int] = set()
        """Ranks whose last line so far a kill has cut short."""
        for rank in sorted(self._living):
            self._say(rank, "begin", run="job", clock="one")
        for rank in sorted(self._living):
            self._basis(rank, "start")

    # -- what happens --------------------------------------------------------------

    def step(self) -> None:
        """An undisturbed step."""
        self._commit(self._living, self._new(), (self._version, self._generation, 0))
        self._finish()

    def lose_unknown(self) -> None:
        """A rank is lost before any rank knows the vote: the step is computed again."""
        self._change(self._lost(), "loss")
        self.step()

    def lose_known(self) -> None:
        """A rank is lost when some survivors know the vote: the step is finished."""
        lost = self._lost()
        knowing = {rank for rank in self._living if self._random.random() < 0.5} | {min(self._living)}
        self._commit(knowing | lost, self._new(), (self._version, self._generation, 0))
        self._change(lost, "loss")
        self._finish()

    def lose_the_vote(self) -> None:
        """A rank that alone knows the vote is lost: the vote is taken again, or the step computed again."""
        lost = self._lost()
        key = (self._version, self._generation, 0)
        self._commit(lost, self._new(), key, keep=False)
        self._change(lost, "loss")
        gradient = key if self._random.random() < 0.5 else (self._version, self._generation, 0)
        self._commit(self._living, self._new(), gradient)
        self._finish()

    def rejoin(self) -> None:
        """A lost rank is admitted between two steps."""
        away = set(self._lives) - self._living
        if away:
            rank = self._random.choice(sorted(away))
            self._lives[rank] += 1
            self.cut.discard(rank)
            self._say(rank, "begin", run="job", clock="one")
            self._change(set(), "join", {rank})

    def all_anew(self) -> None:
        """State is lost with more ranks than it has copies: the job goes back to a checkpoint."""
        back = self._random.randrange(self._version + 1)
        why = f"state of step {self._version} is lost: 2 blocks of units [0] have no surviving copy"
        for rank in sorted(self._living):
            self._say(rank, "end", step=self._version, code=4, why=why)
        self._generation += 1
        del self._chain[back + 1 :]
        self._chain[back] = self._new()
        for rank in self._lives:
            self._lives[rank] += 1
            self._say(rank, "begin", run="job", clock="one")
        self._living = set(self._lives)
        for rank in sorted(self._living):
            self._basis(rank, "load")

    def end(self) -> History:
        """All come to the end of the training."""
        self.step()
        for rank in sorted(self._living):
            self._say(rank, "end", step=self._version, code=0, why="")
        return self.files

    # -- lines ---------------------------------------------------------------------

    @property
    def _version(self) -> int:
        return len(self._chain) - 1

    def _new(self) -> str:
        self._names += 1
        return f"record{self._names}"

    def _say(self, rank: int, kind: str, **fields: Any) -> None:
        self._now += 1
        head = {"kind": kind, "wall": float(self._now), "monotonic_ns": self._now, "rank": rank}
        line = {**head, "incarnation": self._lives[rank], "generation": self._generation, "event": fields}
        self.files[rank].append(line)

    def _record(self, rank: int, source: str, digest: str, step: int, **fields: Any) -> None:
        nothing: Line = {"before": "", "samples": None, "gradient": None, "ledger": "", "grad_norm": 0.0, "members": []}
        said = {"step": step, "source": source, "digest": digest, "skipped": False, **nothing, **fields}
        self._say(rank, "record", **said)

    def _basis(self, rank: int, source: str) -> None:
        self._record(rank, source, self._chain[-1], self._version, members=sorted(self._living))

    def _facts(self, step: int) -> dict[str, Any]:
        return {"samples": [BATCH * (step - 1), BATCH * step], "ledger": f"ledger{step}", "grad_norm": 1.0 / step}

    def _commit(self, ranks: set[int], digest: str, gradient: tuple[int, int, int], keep: bool = True) -> None:
        step, before = self._version + 1, self._chain[-1]
        for rank in sorted(ranks):
            facts = self._facts(step)
            self._record(rank, "vote", digest, step, before=before, gradient=list(gradient), **facts)
        if keep:
            self._chain.append(digest)

    def _finish(self) -> None:
        for rank in sorted(self._living):
            self._say(rank, "phases", step=self._version, nanoseconds={})
        facts = {**self._facts(self._version), "skipped": False, "computed": BATCH}
        self._say(min(self._living), "step", step=self._version, **facts)

    def _lost(self) -> set[int]:
        """One rank, if another is left."""
        return {self._random.choice(sorted(self._living))} if len(self._living) > 1 else set()

    def _change(self, lost: set[int], reason: str, joined: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """A generation without ``lost`` and with ``joined``."""
        stayed = self._living - lost
        for rank in lost:
            if self._random.random() < 0.3:
                self.cut.add(rank)
        self._living = stayed | joined
        self._generation += 1
        for rank in sorted(stayed):
            self._basis(rank, "decision")
        for rank in sorted(joined):
            self._basis(rank, "join")
        for rank in sorted(stayed):
            told = {"reason": reason, "members": sorted(self._living), "lost": sorted(lost), "joined": sorted(joined)}
            self._say(rank, "generation", number=self._generation, **told)
            for gone in sorted(lost):
                self._say(rank, "loss", lost_rank=gone, lost_incarnation=self._lives[gone], step=self._version)


def write(folder: Path, files: Mapping[int, list[Line]], cut: Mapping[int, int] | None = None) -> Path:
    """Write the event log in place of another. ``cut``: rank → bytes of a last line that a kill has cut short."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for rank, lines in files.items():
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        torn = json.dumps({"kind": "phases", "wall": 1.0}, separators=(",", ":"))[: (cut or {}).get(rank, 0)]
        (folder / f"rank{rank:05d}.jsonl").write_text(text + torn)
    return folder


# -- ways to spoil a history ----------------------------------------------------------------


def _all(files: History, kind: str = "record", source: str = "") -> Iterator[Line]:
    for lines in files.values():
        for line in lines:
            if line["kind"] == kind and (not source or line["event"]["source"] == source):
                yield line


def _kept(files: History) -> dict[int, list[Line]]:
    """Step → the votes of the newest record of it that all members have."""
    found: dict[int, list[Line]] = {}
    for line in sorted(_all(files, source="vote"), key=lambda line: line["monotonic_ns"]):
        votes = found.setdefault(line["event"]["step"], [])
        if votes and votes[0]["event"]["digest"] != line["event"]["digest"]:
            votes.clear()
        votes.append(line)
    return found


def _of_step(files: History, step: int) -> list[Line]:
    told = [line for line in _all(files, "step") if line["event"]["step"] == step]
    return [*_kept(files)[step], *told]


def committed_twice(files: History, dice: random.Random) -> None:
    """All ranks of a vote commit its step once more, with other samples."""
    step = dice.choice(sorted(_kept(files)))
    for line in _kept(files)[step]:
        lines = files[line["rank"]]
        again = json.loads(json.dumps(line))
        again["event"] |= {"digest": "again", "samples": [BATCH * (step + 50), BATCH * (step + 51)], "ledger": "again"}
        lines.insert(lines.index(line) + 1, again)


def sample_skipped(files: History, dice: random.Random) -> None:
    """From some step on, all samples are those after one that no step uses."""
    first = dice.choice(sorted(_kept(files)))
    for step in _kept(files):
        for line in _of_step(files, step) if step >= first else ():
            line["event"]["samples"] = [number + 1 for number in line["event"]["samples"]]


def samples_twice(files: History, dice: random.Random) -> None:
    """A step uses the samples of the one before it, and says otherwise."""
    steps = sorted(_kept(files))[1:]
    step = dice.choice(steps)
    for line in _of_step(files, step):
        line["event"]["ledger"] = _kept(files)[step - 1][0]["event"]["ledger"]


def records_differ(files: History, dice: random.Random) -> None:
    """One rank has another record of a step than the others."""
    votes = dice.choice([votes for votes in _kept(files).values() if len(votes) > 1])
    dice.choice(votes)["event"]["digest"] = "other"


def goes_on_when_void(files: History, dice: random.Random) -> None:
    """A lost rank commits two more steps in its generation."""
    lost = dice.choice(list(_all(files, "loss")))["event"]
    lines = files[lost["lost_rank"]]
    last = max(number for number, line in enumerate(lines) if line["incarnation"] == lost["lost_incarnation"])
    held = [line for line in lines[: last + 1] if line["kind"] == "record"][-1]
    for more in (1, 2):
        line = json.loads(json.dumps(held))
        step = held["event"]["step"] + more
        facts = {"step": step, "samples": [BATCH * (step - 1), BATCH * step], "ledger": f"ledger{step}"}
        line["event"] |= {**facts, "source": "vote", "digest": f"void{more}", "members": []}
        line["event"] |= {"before": lines[last]["event"].get("digest", held["event"]["digest"])}
        line["event"]["gradient"] = [step - 1, held["generation"], 0]
        line["monotonic_ns"] = 10**6
        lines.insert(last + more, line)


def decision_undone(files: History, dice: random.Random) -> None:
    """A generation goes on from the step before one that survivors knew."""
    known = [line for line in _all(files, source="decision") if line["event"]["step"] > 0]
    chosen = dice.choice(known)
    digests = {line["event"]["step"]: line["event"]["digest"] for line in _all(files) if line["event"]["members"] == []}
    for line in known:
        if line["generation"] == chosen["generation"]:
            step = line["event"]["step"] - 1
            line["event"] |= {"step": step, "digest": digests.get(step, "start")}


def step_missing(files: History, dice: random.Random) -> None:
    """No rank has logged a vote on some step; the one after it names its record."""
    step = dice.choice(sorted(_kept(files)))
    gone = [id(line) for line in _kept(files)[step]]
    for lines in files.values():
        lines[:] = [line for line in lines if id(line) not in gone]


def never_told(files: History, dice: random.Random) -> None:
    """No rank has told of a step that was committed."""
    step = dice.choice(sorted(_kept(files))[:-1])
    for lines in files.values():
        lines[:] = [line for line in lines if line["kind"] != "step" or line["event"]["step"] != step]


def hangs(files: History, dice: random.Random) -> None:
    """A rank stops writing before the last step."""
    ended = [line for line in _all(files, "end") if line["event"]["code"] == 0]
    rank = dice.choice(ended)["rank"]
    last = max(_kept(files))
    files[rank][:] = [line for line in files[rank] if line["kind"] != "end" and line["event"].get("step") != last]


def file_emptied(files: History, dice: random.Random) -> None:
    """Nothing is left of what a rank wrote, as of one on a machine whose files were not collected."""
    files[dice.choice(sorted(files))].clear()


def two_lives_at_once(files: History, dice: random.Random) -> None:
    """A rank's earlier incarnation writes on when its successor has begun."""
    begun = [line for line in _all(files, "begin") if line["incarnation"] > 0]
    lines = files[dice.choice(begun)["rank"]]
    earlier = next(line for line in lines if line["kind"] == "record")
    lines.append(json.loads(json.dumps(earlier)))


SPOILED: dict[str, tuple[Callable[[History, random.Random], None], tuple[str, ...]]] = {
    spoil.__name__: (spoil, rules)
    for spoil, rules in (
        (committed_twice, ("committed once",)),
        (sample_skipped, ("each sample once",)),
        (samples_twice, ("each sample once",)),
        (records_differ, ("one history",)),
        (goes_on_when_void, ("void generations",)),
        (decision_undone, ("not undone", "one history")),
        (step_missing, ("committed once",)),
        (never_told, ("committed once",)),
        (hangs, ("all ended",)),
        (file_emptied, ("all logged",)),
        (two_lives_at_once, ("void generations",)),
    )
}
"""Name → how a history is spoiled, and the rules of which one is then broken."""
