"""One worker's shared-memory slot: its activity, its last words, its lease.

The slot is a memfd that the agent makes and the worker inherits. The worker writes its activity without a system
call. The agent can read it while the worker is stopped, hung or dead, when the worker could send no message. A
sequence word, odd during a write, guards the activity: a reader never takes half an update. If the writer dies during
a write, the word stays odd and the reader keeps the last complete activity. The newest committed step, at 1536, has a
sequence word of its own: another thread writes it. So have the figures of the run, at 2304, which the agent writes.

Layout (little endian)::

    at 0     u64 lease end ns | u64 sequence | i64 step | u64 progress | u64 stamp ns | u64 usual ns
             i32 finished | i32 code | u16 phase length | u16 waiting count | 64 bytes phase | u32 × 256 waiting for
    at 1400  u64 stamp ns of the newest look at the published wait; 0: no wait in native code is published
    at 1536  u64 sequence | i64 step | i64 target | i64 samples | f64 seconds | f64 loss | u64 stamp ns
    at 2048  u32 exit reason
    at 2304  u64 sequence | i64 × 6 counts | f64 × 4 seconds and share | f64 × 6 seconds by cause
    at 3072  a lock that the worker's training thread holds for life
    at 4096  u32 length | last words

The lease ends by CLOCK_BOOTTIME, which also counts the time that a machine is suspended. Other times are
CLOCK_MONOTONIC. All processes of a host share both clocks.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

from megatron.elastic import _process
from megatron.elastic.control.clock import boot_ns
from megatron.elastic.control.exits import ExitReason
from megatron.elastic.control.membership import Activity, Committed, RunFigures
from megatron.elastic.control.observations import CAUSES

__all__ = ["SLOT_BYTES", "Glimpse", "Slot"]

SLOT_BYTES = 1 << 16
_WATCHED_AT = 1400
_COMMITTED_AT = 1536
_REASON_AT = 2048
_FIGURES_AT = 2304
_LOCK_AT = 3072
_WORDS_AT = 4096
_PHASE_BYTES = 64
_MAX_WAITING = 256
_HEAD = struct.Struct("<qQQQ")
_BEGUN = struct.Struct("<QqQQQ")
"""The sequence word and the head, which follows it."""
_COMMITTED = struct.Struct("<qqqddQ")
_FIGURES = struct.Struct(f"<6q4d{len(CAUSES)}d")
_FINISH = struct.Struct("<ii")
_COUNTS = struct.Struct("<HH")
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_AT_LEASE, _AT_SEQUENCE, _AT_HEAD, _AT_FINISH, _AT_COUNTS, _AT_PHASE = 0, 8, 16, 48, 56, 60
_AT_WAITING = _AT_PHASE + _PHASE_BYTES
_ANNOUNCED, _PROGRAM_OVER = 1, 2
_NO_STEP = -1


@lru_cache(maxsize=1024)
def _tail(phase: str, waiting: tuple[int, ...]) -> bytes:
    """Return an activity behind its head. There are few different ones in a generation."""
    name, ranks = phase.encode()[:_PHASE_BYTES], waiting[:_MAX_WAITING]
    return struct.pack(f"<HH{_PHASE_BYTES}s{len(ranks)}I", len(name), len(ranks), name, *ranks)


@dataclass(frozen=True)
class Glimpse:
    """The agent's view of a worker: its activity, how often and when it last changed (ns, monotonic)."""

    activity: Activity
    progress: int
    stamp_ns: int
    usual_ns: int = 0
    """Duration of this phase here when it ended last; 0: it never did. Measured by the worker: an agent
    that looks now and then may never see a short phase at all."""
    watched_ns: int = 0
    """When the worker last saw that it still waits in native code (ns, monotonic); 0: it published no such wait."""


class Slot:
    """The slot behind ``fd``; either side maps it. ``fd`` stays the caller's. ``clock``: ns, of the lease."""

    def __init__(self, fd: int, clock: Callable[[], int] = boot_ns) -> None:
        self._clock = clock
        self._map = mmap.mmap(fd, SLOT_BYTES)
        self._sequence: int = _U64.unpack_from(self._map, _AT_SEQUENCE)[0] & ~1
        self._commits: int = _U64.unpack_from(self._map, _COMMITTED_AT)[0] & ~1
        self._progress = 0
        self._last = Glimpse(Activity(_NO_STEP, "launch"), 0, 0)
        self._lasted: dict[str, int] = {}
        self._present = ("", 0)
        self._is_watched = False

    @classmethod
    def create(cls, name: str, clock: Callable[[], int] = boot_ns) -> tuple[int, Slot]:
        """A new zeroed slot and its file descriptor (not inheritable until asked for)."""
        fd = os.memfd_create(name)
        os.ftruncate(fd, SLOT_BYTES)
        slot = cls(fd, clock)
        slot.publish(Activity(_NO_STEP, "launch"), progress=0)
        return fd, slot

    # -- the worker's side ------------------------------------------------

    def publish(self, activity: Activity, progress: int | None = None) -> None:
        """Write what this worker does; costs a few stores."""
        self._progress = self._progress + 1 if progress is None else progress
        now, (before, since) = time.monotonic_ns(), self._present
        self._lasted[before], self._present = now - since, (activity.phase, now)
        usual = self._lasted.get(activity.phase, 0)
        tail = _tail(activity.phase, activity.waiting_for)
        self._sequence += 2
        _BEGUN.pack_into(self._map, _AT_SEQUENCE, self._sequence - 1, activity.step, self._progress, now, usual)
        self._map[_AT_COUNTS : _AT_COUNTS + len(tail)] = tail
        if self._is_watched:
            self._is_watched = False
            _U64.pack_into(self._map, _WATCHED_AT, 0)
        _U64.pack_into(self._map, _AT_SEQUENCE, self._sequence)

    def watched(self) -> None:
        """Note that the published wait, which native code makes, still goes on."""
        self._is_watched = True
        _U64.pack_into(self._map, _WATCHED_AT, time.monotonic_ns())

    def commit(self, step: Committed) -> None:
        """Write the newest committed step; costs a few stores."""
        self._commits += 1
        _U64.pack_into(self._map, _COMMITTED_AT, self._commits)
        values = step.step, step.target, step.samples, step.seconds, step.loss, time.monotonic_ns()
        _COMMITTED.pack_into(self._map, _COMMITTED_AT + _U64.size, *values)
        self._commits += 1
        _U64.pack_into(self._map, _COMMITTED_AT, self._commits)

    def figures(self) -> RunFigures | None:
        """Return the newest figures of the run; None before the first, or where the agent writes again and again."""
        for _ in range(4):
            before = _U64.unpack_from(self._map, _FIGURES_AT)[0]
            values = _FIGURES.unpack_from(self._map, _FIGURES_AT + _U64.size)
            if before & 1 == 0 and _U64.unpack_from(self._map, _FIGURES_AT)[0] == before:
                figures: list[Any] = [*values[: -len(CAUSES)], values[-len(CAUSES) :]]
                return RunFigures(*figures) if before else None
        return None

    def finish(self, code: int) -> None:
        """Mark the coming end as meant."""
        _FINISH.pack_into(self._map, _AT_FINISH, _ANNOUNCED, code)

    def end_program(self, code: int) -> None:
        """Note that the user's program is over, with ``code``: where :meth:`finish` told of success, this one counts.

        A worker that did not announce its end is left to its wait status.
        """
        announced = self.finished()
        if announced is not None:
            _FINISH.pack_into(self._map, _AT_FINISH, _PROGRAM_OVER, announced or code)

    def record_error(self, text: str, reason: ExitReason) -> None:
        """Leave the end of ``text`` (a traceback) and the kind of error for the agent to find."""
        _U32.pack_into(self._map, _REASON_AT, reason)
        data = text.encode(errors="replace")[-(SLOT_BYTES - _WORDS_AT - 4) :]
        self._map[_WORDS_AT + 4 : _WORDS_AT + 4 + len(data)] = data
        _U32.pack_into(self._map, _WORDS_AT, len(data))

    def hold(self) -> None:
        """From here on the calling thread's end is this worker's, and heard of from :meth:`lock`."""
        _process.hold(self.lock())

    def lease_over(self) -> bool:
        """True once the time in which this worker may act has run out; never, where no lease was given."""
        end = int(_U64.unpack_from(self._map, _AT_LEASE)[0])
        return end != 0 and self._clock() > end

    # -- the agent's side -------------------------------------------------

    def look(self) -> Glimpse:
        """The newest whole activity; tolerant of anything a broken worker may have written."""
        for _ in range(4):
            before = _U64.unpack_from(self._map, _AT_SEQUENCE)[0]
            if before & 1:
                continue
            step, progress, stamp, usual = _HEAD.unpack_from(self._map, _AT_HEAD)
            phase_length, count = _COUNTS.unpack_from(self._map, _AT_COUNTS)
            phase = self._map[_AT_PHASE : _AT_PHASE + min(phase_length, _PHASE_BYTES)]
            waiting = struct.unpack_from(f"<{min(count, _MAX_WAITING)}I", self._map, _AT_WAITING)
            watched = int(_U64.unpack_from(self._map, _WATCHED_AT)[0])
            if _U64.unpack_from(self._map, _AT_SEQUENCE)[0] == before:
                activity = Activity(step, phase.decode(errors="replace"), waiting)
                self._last = Glimpse(activity, progress, stamp, usual, watched)
                break
        return self._last

    def committed(self) -> tuple[Committed, int] | None:
        """The newest committed step and when it was written (ns, monotonic); None before the first, or during a write.

        The values are as untrusted as the worker.
        """
        before = _U64.unpack_from(self._map, _COMMITTED_AT)[0]
        *values, stamp = _COMMITTED.unpack_from(self._map, _COMMITTED_AT + _U64.size)
        if before == 0 or before & 1 or _U64.unpack_from(self._map, _COMMITTED_AT)[0] != before:
            return None
        return Committed(*values), stamp

    def tell(self, figures: RunFigures) -> None:
        """Write the figures of the run for the worker; costs a few stores."""
        sequence = int(_U64.unpack_from(self._map, _FIGURES_AT)[0]) & ~1
        _U64.pack_into(self._map, _FIGURES_AT, sequence + 1)
        *one_by_one, causes = astuple(figures)
        _FIGURES.pack_into(self._map, _FIGURES_AT + _U64.size, *one_by_one, *causes)
        _U64.pack_into(self._map, _FIGURES_AT, sequence + 2)

    def finished(self) -> int | None:
        """The code a worker announced for its purposeful end, if it did."""
        flag, code = _FINISH.unpack_from(self._map, _AT_FINISH)
        return int(code) if flag in (_ANNOUNCED, _PROGRAM_OVER) else None

    def program_over(self) -> bool:
        """True once a worker that announced its end has come to the end of the user's program."""
        return bool(_FINISH.unpack_from(self._map, _AT_FINISH)[0] == _PROGRAM_OVER)

    def error_text(self) -> str:
        """The text of :meth:`record_error`, or nothing."""
        length = min(_U32.unpack_from(self._map, _WORDS_AT)[0], SLOT_BYTES - _WORDS_AT - 4)
        return self._map[_WORDS_AT + 4 : _WORDS_AT + 4 + length].decode(errors="replace")

    def exit_reason(self) -> ExitReason:
        """The kind of error that :meth:`record_error` left; tolerant of anything else."""
        found = _U32.unpack_from(self._map, _REASON_AT)[0]
        return ExitReason(found) if found in ExitReason.__members__.values() else ExitReason.UNKNOWN

    def lock(self) -> memoryview:
        """The bytes that :meth:`hold` locks; to be released before :meth:`close`."""
        return memoryview(self._map)[_LOCK_AT : _LOCK_AT + _process.LOCK_BYTES]

    def extend_lease(self, until_ns: int) -> None:
        """Allow the worker to act until ``until_ns`` of the clock."""
        _U64.pack_into(self._map, _AT_LEASE, until_ns)

    def close(self) -> None:
        """Unmap."""
        self._map.close()
