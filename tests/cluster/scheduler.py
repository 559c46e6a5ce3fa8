"""One thread of many runs at a time, chosen by a seed; time passes only here.

A task is a thread that belongs to a process. It runs until it waits (:meth:`Scheduler.wait`); then the scheduler draws
the next among those whose condition holds. So a run is a function of the seed and of the code that runs. When no
condition holds, the clock goes on to the next time-out. A task waits in no other way, and holds no lock while it does.

A process ends by :meth:`Scheduler.end`: each of its tasks is thrown :class:`Killed` where it stands. Now and then a
task stalls, so that schedules are tried in which some thread is late for long, though none is for ever.

A run ends with the first error of any task, with a :class:`Deadlock` (no rank can continue), or when it is told to end.
"""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from megatron.elastic.platform.threads import Condition, Event

__all__ = ["ClusterThreads", "Deadlock", "Killed", "Process", "Scheduler", "Task"]

TICK = 1e-4
"""Seconds that pass with every choice of a task."""
IDLE = 60.0
"""Nothing but a time-out longer than this is left to wait for: no rank can continue."""
STALLS = 0.1
"""Probability that a task stalls: it is kept for long from its next turn."""
HASTE = 0.02
"""Probability with which one that stalls is considered together with the others."""


class Killed(BaseException):
    """The process of this task has ended: no line of it runs any more, but what leaves its blocks."""


class Deadlock(AssertionError):
    """No task can go on; says where each of them waits."""


@dataclass
class Process:
    """Tasks that end as a whole. ``resumed`` is called whenever one of its tasks is about to run."""

    name: str
    dead: bool = False
    stopped: bool = False
    """None of its tasks runs (SIGSTOP); it can end all the same."""
    resumed: Callable[[], None] = lambda: None


@dataclass(eq=False)
class Task:
    """One thread."""

    name: str
    process: Process
    stalls: bool
    ready: Callable[[], bool]
    until: float | None = None
    over: bool = False
    thread: threading.Thread | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held by whatever else runs: to release it lets the task go on."""


class Scheduler:
    """See the module docstring. ``turns``: how many choices a run may take."""

    def __init__(self, seed: int, turns: int = 200_000) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.turns = 0
        self.error: BaseException | None = None
        self.over: Callable[[], bool] = lambda: False
        self._limit = turns
        self._tasks: list[Task] = []
        self._threads: list[threading.Thread] = []
        self._current: Task | None = None
        self._stopped = False
        self._finished = threading.Event()

    # -- from outside --------------------------------------------------------------

    def run(self) -> None:
        """Let tasks run until the run is over. Raises the first error of any of them, or :class:`Deadlock`."""
        if self._tasks:
            self._hand_over(self._chosen())
            self._finished.wait()
            for thread in self._threads:
                thread.join()  # a thread that ends while the interpreter does may abort it
        if self.error is not None:
            raise self.error

    # -- from tasks ----------------------------------------------------------------

    @property
    def current(self) -> Task:
        """The task that runs."""
        assert self._current is not None, "asked from outside of a task"
        return self._current

    def spawn(self, process: Process, name: str, body: Callable[[], None]) -> Task:
        """Have ``body`` run as a task of ``process``."""
        task = Task(f"{process.name} {name}", process, self.random.random() < STALLS, _always)
        task.thread = threading.Thread(target=self._life, args=(task, body), name=task.name, daemon=True)
        task.turn.acquire()
        self._tasks.append(task)
        self._threads.append(task.thread)
        task.thread.start()
        return task

    def wait(self, ready: Callable[[], bool] | None = None, seconds: float | None = None) -> bool:
        """Let others run, until ``ready`` holds or ``seconds`` have passed; whether it holds.

        ``ready`` changes nothing. Raises :class:`Killed` in a process that has ended.
        """
        task = self.current
        if not task.process.dead and not self._stopped:
            task.ready, task.until = ready or _always, None if seconds is None else self.now + seconds
            chosen = self._chosen()
            if chosen is not task:
                self._hand_over(chosen)
                task.turn.acquire()
        if task.process.dead or self._stopped:
            raise Killed
        return ready is None or ready()

    def end(self, process: Process) -> None:
        """``process`` is dead from here on. Its tasks are thrown :class:`Killed` when they come to run."""
        process.dead = True

    # -- the baton -----------------------------------------------------------------

    def _life(self, task: Task, body: Callable[[], None]) -> None:
        task.turn.acquire()
        try:
            if not (task.process.dead or self._stopped):
                body()
        except Killed:
            pass
        except BaseException as error:
            self._stop(error)
        task.over = True
        self._tasks.remove(task)
        if self._tasks:
            self._hand_over(self._chosen())
        else:
            self._finished.set()

    def _stop(self, error: BaseException | None = None) -> None:
        self._stopped, self.error = True, self.error or error

    def _hand_over(self, task: Task) -> None:
        self._current = task
        task.process.resumed()
        task.turn.release()

    def _chosen(self) -> Task:
        """The task that runs next; in a run that has ended, the next that is to leave."""
        self.turns += 1
        self.now += TICK
        if not self._stopped and self.over():
            self._stop()
        if not self._stopped and self.turns > self._limit:
            self._stop(Deadlock(f"no end after {self._limit} turns\n{self._where()}"))
        while not self._stopped:
            able = self._able()
            if able is not None:
                return able
            running = [task for task in self._tasks if not task.process.stopped]
            next_end = min((task.until for task in running if task.until is not None), default=None)
            if next_end is None or next_end > self.now + IDLE:
                self._stop(Deadlock(f"no rank can continue\n{self._where()}"))
            else:
                self.now = next_end
        return self._tasks[0]

    def _able(self) -> Task | None:
        """One that can go on, drawn: one that stalls rarely before the others."""
        late, found = [], None
        first = int(self.random.random() * len(self._tasks))
        for task in (*self._tasks[first:], *self._tasks[:first]):
            if task.stalls and self.random.random() >= HASTE:
                late.append(task)
            elif self._is_able(task):
                found = task
                break
        found = found or next(filter(self._is_able, late), None)
        if found is not None:
            found.stalls = self.random.random() < STALLS
        return found

    def _is_able(self, task: Task) -> bool:
        if task.process.stopped and not task.process.dead:
            return False
        return task.ready() or task.process.dead or (task.until is not None and self.now >= task.until)

    def _where(self) -> str:
        """Where each task waits, without the scheduler's own frames."""
        frames = sys._current_frames()
        lines = []
        for task in self._tasks:
            thread = task.thread
            frame = None if thread is None or thread.ident is None else frames.get(thread.ident)
            stack = [] if frame is None else traceback.extract_stack(frame)
            places = [f"{at.filename.rpartition('/')[2]}:{at.lineno} {at.name}" for at in stack]
            own = [place for place in places if not place.startswith(("scheduler.py", "threading.py"))]
            lines.append(f"  {task.name}: {' > '.join(own[-6:])}")
        return "\n".join(lines)


def _always() -> bool:
    return True


class _Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._is_set = scheduler, False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        return self._scheduler.wait(self.is_set, timeout)


class _Condition:
    def __init__(self, scheduler: Scheduler, lock: threading.Lock) -> None:
        self._scheduler, self._lock, self._notified = scheduler, lock, 0

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        seen = self._notified
        self._lock.release()
        try:
            return self._scheduler.wait(lambda: self._notified > seen, timeout)
        finally:
            self._lock.acquire()

    def notify_all(self) -> None:
        self._notified += 1


@dataclass(frozen=True)
class _Running:
    scheduler: Scheduler
    task: Task

    def join(self) -> None:
        self.scheduler.wait(lambda: self.task.over)


@dataclass(frozen=True)
class ClusterThreads:
    """Implements :class:`megatron.elastic.platform.threads.Threads` for one process."""

    scheduler: Scheduler
    process: Process

    def monotonic(self) -> float:
        return self.scheduler.now

    def sleep(self, seconds: float) -> None:
        self.scheduler.wait(lambda: False, seconds)

    def start(self, name: str, body: Callable[[], None]) -> _Running:
        return _Running(self.scheduler, self.scheduler.spawn(self.process, name, body))

    def event(self) -> Event:
        return _Event(self.scheduler)

    def condition(self, lock: threading.Lock | None = None) -> Condition:
        return _Condition(self.scheduler, lock or threading.Lock())
