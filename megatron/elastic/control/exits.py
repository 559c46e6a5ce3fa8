"""The ways in which a worker or a job ends: exit codes, kinds of error, kinds of loss."""

from __future__ import annotations

from enum import IntEnum, StrEnum

__all__ = ["Ending", "ExitCode", "ExitReason"]


class ExitCode(IntEnum):
    """Exit codes of the launcher and, where they differ from a program's own, of workers."""

    DONE = 0
    FAILED = 1
    DRAINED = 3
    """The job has saved and may be queued again."""
    STATE_LOST = 4
    """No copy of some state is left: the job may be queued again and starts from its last checkpoint."""
    DETERMINISTIC = 5
    """The job would fail again in the same way."""
    FELL_BACK = 6
    """Of a rank that cannot get past its step: the job starts anew from its last checkpoint, once."""
    BEGUN_ANEW = 7
    """Of a rank without state to continue from or members to join: the job starts anew, any number of times."""


class ExitReason(IntEnum):
    """The kind of error that ended a worker's program, as the worker left it in shared memory."""

    UNKNOWN = 0
    """It left none: killed, ended by an exit code, or not a Python program."""
    ERROR = 1
    COMMUNICATION = 2
    """The end of another process is its cause."""
    INPUT = 3
    """Flags, data or the machine are at fault: all ranks find the same error."""


class Ending(StrEnum):
    """The kind of a loss: why an incarnation was lost."""

    KILLED = "killed"
    """From outside: by a signal, its agent or the loss of its node."""
    ERROR = "error"
    """By an error of its own."""
    COMMUNICATION = "communication"
    """By an error that the end of another process causes, or by a library that locked up."""
    LEFT = "left"
    """With exit code 0, though it had not announced that it was done."""
    FALL_BACK = "fall back"
    """It cannot get past its step and asks for the last checkpoint."""
    BEGIN_ANEW = "begin anew"
    """It had neither state to continue from nor members to join."""
