"""Losses that would come back: pure rules that end a job instead of looping.

A machine that dies does so anywhere; a bug strikes at the same step again. A
program that ended by itself with an error (not by a signal) at a step where one
already did, in an earlier life or on another rank, is deterministic.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from megatron.elastic.control.exits import ExitCode

__all__ = ["Failures", "exit_status"]

_SEVERITY = (ExitCode.DETERMINISTIC, ExitCode.STATE_LOST, ExitCode.FAILED, ExitCode.DRAINED)
"""Exit codes of ranks, the one that decides the job's first."""

_STARTS = 3


class Failures(msgspec.Struct, forbid_unknown_fields=True):
    """The losses so far, the same on every agent. Times are seconds of the job."""

    max_per_hour: int = 0
    _raised_at: dict[int, list[tuple[int, int]]] = {}
    _times: list[float] = []
    _failed_starts: dict[int, int] = {}
    _reached: int = -1
    _ends: list[int] = []
    """The step that was reached before each loss of all ranks."""
    _fell: dict[int, dict[int, int]] = {}
    """Step at which ranks fell back to the checkpoint → rank → its incarnation then."""
    _member: dict[int, int] = {}
    """Rank → its newest incarnation that became a member."""
    verdict: str = ""
    """Why the job cannot be run again with a better result; empty while nothing says so."""

    def record(self, rank: int, incarnation: int, step: int, raised: bool, now: float) -> str | None:
        """Note a loss; a text when the job should end for it (``raised``: ended by itself with an error)."""
        recent = next((at for at, time in enumerate(self._times) if now - time < 3600.0), len(self._times))
        del self._times[:recent]  # only the oldest: many ranks may be lost at once
        self._times.append(now)
        self._reached = max(self._reached, step)
        if raised and step >= 0:
            at = self._raised_at.setdefault(step, [])
            at.append((rank, incarnation))
            if len(at) > 1:
                who = ", ".join(f"rank {r} (incarnation {i})" for r, i in at)
                self.verdict = (
                    f"step {step} fails deterministically: {who} ended with an error there; "
                    "the job ends, since a restart would repeat it"
                )
                return self.verdict
        if self.max_per_hour and len(self._times) > self.max_per_hour:
            return (
                f"{len(self._times)} ranks were lost within an hour, more than "
                f"--elastic-max-losses-per-hour {self.max_per_hour}: the job ends"
            )
        return None

    def fell_back(self, rank: int, incarnation: int, step: int) -> str | None:
        """Note a rank that asks for the last checkpoint; a text when it did so at this step before."""
        before = self._fell.setdefault(step, {}).setdefault(rank, incarnation)
        if before < incarnation:
            return (
                f"step {step}: a gradient is not finite, also after the job went "
                "back to its last checkpoint: the job ends"
            )
        return None

    def started_anew(self) -> str | None:
        """Note that the job starts anew after the loss of all ranks; a text when it gets no further than before."""
        self._ends.append(self._reached)
        self._reached = -1
        last = self._ends[-_STARTS:]
        if len(last) == _STARTS and last[0] >= max(last[1:]):
            return (
                f"all ranks were lost {_STARTS} times in a row, each time before "
                f"step {last[0] + 1} was complete: the job ends"
            )
        return None

    def admitted(self, rank: int, incarnation: int) -> None:
        """``incarnation`` of ``rank`` is a member."""
        self._member[rank] = incarnation
        self._failed_starts.pop(rank, None)

    def failed_to_join(self, rank: int, incarnation: int) -> bool:
        """Note the end of a newcomer, if it was one: True when several in a row ended before they were members."""
        if self._member.get(rank) == incarnation:
            return False
        self._failed_starts[rank] = self._failed_starts.get(rank, 0) + 1
        return self._failed_starts[rank] >= _STARTS

    def cool_down(self, rank: int) -> float:
        """Seconds to wait before starting ``rank`` again: none the first time, growing with the failed starts."""
        count = self._failed_starts.get(rank, 0)
        return 0.0 if count == 0 else min(60.0, 0.25 * 2.0**count)


def exit_status(
    ended: tuple[int, str] | None, codes: Collection[int], verdict: str, stopping: bool = False
) -> tuple[int, str]:
    """The launcher's exit status and the last line it prints (empty: none).

    ``ended``: exit code and reason in the journal's entry that ended the job, if there is one; ``codes``: exit codes of
    the ranks that finished; ``verdict``: :attr:`Failures.verdict`. An error on several ranks at one step takes the last
    copy of the state with it. Such a job reports the error, not the lost state: a second run would end the same way.
    ``stopping``: a user asked the job to stop for good, so no status that has it queued again is returned.
    """
    if ended is not None:
        code, why = ended
    elif codes:
        code, why = next((code for code in _SEVERITY if code in codes), max(codes)), ""
    else:
        code, why = ExitCode.STATE_LOST, "no rank is left that could go on: resume from the last checkpoint (--load)"
    if stopping and code == ExitCode.DRAINED:
        return ExitCode.DONE, why or "stopped as asked (ctl stop): exit status 0, the job is not queued again"
    if stopping and code == ExitCode.STATE_LOST:
        return ExitCode.DETERMINISTIC, why or "stopped as asked (ctl stop), but not saved: exit status 5"
    return (ExitCode.DETERMINISTIC, verdict) if code == ExitCode.STATE_LOST and verdict else (code, why)
