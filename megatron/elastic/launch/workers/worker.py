"""From a fresh fork to the user's program.

The forked process cuts its ties with the zygote (session, signals, descriptors),
takes on the environment torchrun would have given it, and runs the script as
``__main__`` the way ``python script.py`` does. An exception that ends the script
is printed, and also left in the worker's slot, so that the launcher can tell a
bug that will come back from a machine that died.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import traceback
import types
from dataclasses import dataclass
from string import Template
from typing import Any, NoReturn

from megatron.elastic.comm.errors import CommError
from megatron.elastic.control import env
from megatron.elastic.control.exits import ExitReason
from megatron.elastic.control.slot import Slot
from megatron.elastic.launch.workers.processes import chain_children, die_with_parent, name_process, note_process
from megatron.elastic.launch.workers.zygote_messages import WorkerSpec

__all__ = ["OF_A_JOB", "Start", "become", "reason_of", "run_script"]

OF_A_JOB = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a scheduler or a terminal sends to all processes of a job.

The zygote ignores them, because its agent handles them and ends it. They stay blocked until it does.
"""


@dataclass
class Start:
    """The start of a worker in a process that the zygote forks."""

    spec: WorkerSpec
    fds: list[int]
    """Control socket, slot, standard output, standard error."""
    parent: int
    """Process that the worker ends with."""
    exec_python: bool = False
    """Begin with a new interpreter instead of the zygote's."""

    def close_fds(self) -> None:
        """Close the parent's copies."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def become(start: Start) -> NoReturn:
    """Turn this forked process into the worker, and end it with the exit code of the user's program."""
    spec = start.spec
    die_with_parent(start.parent)
    os.setsid()
    _reset_signals(spec)
    control, slot = _take_descriptors(start)
    os.environ.update((name, spec.variable(name)) for name in spec.environ)
    name_process(f"rank{os.environ.get('RANK', '')}")
    os.environ[env.CONTROL_FD], os.environ[env.SLOT_FD] = str(control), str(slot)
    target, arguments = _command(spec)
    if spec.kind == "program":
        _exec(target, [target, *arguments], control, slot)
    if start.exec_python:
        # A death signal survives exec; fork hooks do not, and are set up again there.
        runner = [sys.executable, "-u", "-m", "megatron.elastic.launch.workers.worker", spec.kind, str(int(spec.adapt))]
        _exec(sys.executable, [*runner, target, *arguments], control, slot)
    _leave(run_script(spec, slot))


def _command(spec: WorkerSpec) -> tuple[str, list[str]]:
    """The target and its arguments, as text."""
    return os.fsdecode(spec.target), [os.fsdecode(argument) for argument in spec.arguments]


def _take_descriptors(start: Start) -> tuple[int, int]:
    control, slot, out, err = start.fds
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    return control, slot


def _reset_signals(spec: WorkerSpec) -> None:
    for number in OF_A_JOB:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A signal that drains the job ends no worker: the connection to the agent handles and unblocks it.
    names = filter(None, spec.variable(env.DRAIN_SIGNALS).split(","))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.Signals[name] for name in names})


def _exec(path: str, argv: list[str], *keep: int) -> None:
    for fd in keep:
        os.set_inheritable(fd, True)
    try:
        os.execvp(path, argv)
    except OSError as error:
        print(f"cannot run {path}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def run_script(spec: WorkerSpec, slot_fd: int) -> int:
    """Run the user's program in this process; returns its exit code. The last words of an error go to the slot."""
    code = _run_script(spec, slot_fd)
    Slot(slot_fd).end_program(code)
    return code


def _run_script(spec: WorkerSpec, slot_fd: int) -> int:
    chain_children()
    _refresh_interpreter()
    _take_scratch()
    code = 0
    try:
        if spec.adapt:
            import importlib

            importlib.import_module("megatron.elastic.adaptor")
        _run_main(spec)
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        error.__traceback__ = _users_part(error.__traceback__)
        Slot(slot_fd).record_error("".join(traceback.format_exception(error)), reason_of(error))
        sys.stdout.flush()
        if isinstance(error, CommError):
            # Another process ended before there was a state to go on from; the launcher reports which.
            print(f"rank {os.environ.get('RANK', '?')}: {error}", file=sys.stderr, flush=True)
            return 1
        # The program's own hook, where it has set one, as the interpreter would.
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        code = 1
    return code


def reason_of(error: BaseException) -> ExitReason:
    """The kind of ``error`` that ends a program. One that was raised from a communication error is one, too."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CommError):
            return ExitReason.COMMUNICATION
        cause = cause.__cause__
    # Errors that this package names are about what it was given; the program's own are of any other type.
    return ExitReason.INPUT if type(error).__module__.startswith("megatron.elastic.") else ExitReason.ERROR


def _users_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frames through which the launcher ran the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _leave(code: int) -> NoReturn:
    """End as a child of multiprocessing does: what is to run at exit runs, the interpreter is not taken apart.

    Background threads may be inside native code, which it would end by unwinding them: ``terminate called without an
    active exception``, now and then, at the end of a job that was done.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # joins what is no daemon
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr, flush=True)
    return 1


def _refresh_interpreter() -> None:
    """Renew the parts that a process forked from a long-lived one must not share with its siblings."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # A line is one write, so that lines of ranks that share a pipe stay whole, also under PYTHONUNBUFFERED.
            reconfigure(line_buffering=True, write_through=False)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # Python reseeds `random` in a forked child; numpy would repeat one stream on every rank.
        numpy_random.seed()


def _take_scratch() -> None:
    """Have multiprocessing put its sockets and semaphores where the launcher removes them.

    It makes a folder for sockets when it first needs one, for instance to send tensors from a data-loader worker. It
    removes them only at an orderly exit; a killed process leaves them behind.
    """
    scratch, prefix = os.environ.get(env.SCRATCH), os.environ.get(env.SEGMENT_PREFIX)
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if prefix:
        settings["semprefix"] = f"/{prefix}"
    if scratch:
        with contextlib.suppress(OSError):
            os.mkdir(scratch, 0o700)
            settings["tempdir"] = scratch
            note_process(scratch)
            os.register_at_fork(after_in_child=lambda: note_process(scratch))


def _run_main(spec: WorkerSpec) -> None:
    local_rank = os.environ.get("LOCAL_RANK", "0")
    target, arguments = _command(spec)
    # torchrun's one macro.
    sys.argv = [target, *(Template(text).safe_substitute(local_rank=local_rank) for text in arguments)]
    if spec.kind == "module":
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.realpath(target))
    with open(target, "rb") as file:
        code = compile(file.read(), target, "exec")
    main = types.ModuleType("__main__")
    # A module of its own, so that the script can be pickled from and imported again by spawned children.
    main.__dict__.update(__file__=target, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def main(argv: list[str]) -> NoReturn:
    """Second half of a worker started by exec: ``KIND ADAPT TARGET ARGUMENTS…``."""
    spec = WorkerSpec.of(0, argv[1], argv[3], argv[4:], {}, argv[2] == "1")  # type: ignore[arg-type]
    _leave(run_script(spec, int(os.environ[env.SLOT_FD])))


if __name__ == "__main__":
    main(sys.argv)
