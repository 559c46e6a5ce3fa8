"""Talk to a running job: ``python -m megatron.elastic.ctl status|doctor|drain|stop|admit|checkpoint|reshape``.

Run it on any node of the job. Jobs are found by run id (``--run-id``, the launcher's
``--rdzv-id``). With one job on the machine the id can be left out; what ends a job or
ranks of it then asks for ``--yes``. Every answer names the job.

    status      step and rate, time left, members, what can be lost now, last losses and recoveries, lost time
                (--watch: again and again; --json: all of it for programs)
    doctor      for a job that does not start: what is there and what is missing on this node, one line each; exit
                status 1 if something is missing (--store HOST:PORT: also whether the store can be reached)
    drain       save and end the job at the next boundary with exit status 3: it may be queued again, as after SIGTERM
                (--ranks 4,5: only these are asked to leave)
    stop        save and end the job at the next boundary with exit status 0: done for good
    admit       start ranks again that had been given up (--ranks, default: all such); spares named are put to work,
                as further replicas
    checkpoint  save at the next boundary and go on
    reshape     go on with other parallel sizes (--tp 2 --cp 2 --pp 4 --dp 1): state moves while steps go on. Returns
                when the sizes are in force, or says in one line why they cannot be; interrupting it does not withdraw
                the request
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from typing import overload

import msgspec

from megatron.elastic.control.answers import ANSWERS, Acceptance, JobStatus, Refusal, ReshapeStatus
from megatron.elastic.control.doctor import diagnose
from megatron.elastic.control.requests import Admit, Command, Drain, JobRequest, Reshape, SaveCheckpoint, Status, Stop
from megatron.elastic.control.socket_names import CONSOLES, STARTS, console_name, job_name
from megatron.elastic.control.starting import ask_launcher
from megatron.elastic.control.status_text import status_lines
from megatron.elastic.control.wire import FrameReader, ProtocolError, encode, frame

__all__ = ["CtlError", "ask", "consoles", "main"]

_SECONDS = 10.0
_LOOK_SECONDS = 0.2
_WATCH_SECONDS = 2.0
_CLEAR = "\x1b[H\x1b[2J"
"""Moves a terminal's cursor to the upper left corner and clears the screen."""


class CtlError(RuntimeError):
    """One line: why the job could not be reached or would not do it."""


def consoles() -> dict[str, list[int]]:
    """Names of jobs with an agent on this machine (network namespace) → their node numbers here."""
    return _listening(CONSOLES)


def _listening(prefix: str) -> dict[str, list[int]]:
    """Name of a job → numbers of the abstract Unix sockets ``PREFIX NAME/NUMBER`` that are listened at here."""
    prefix = "@" + prefix  # in place of the NUL byte
    found: dict[str, list[int]] = {}
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
        for line in table:
            name = line.split(maxsplit=7)[-1].strip()
            # Listening sockets carry the flag __SO_ACCEPTCON.
            if name.startswith(prefix) and line.split()[3] == "00010000":
                job, _, number = name[len(prefix) :].rpartition("/")
                if number.isdigit():
                    found.setdefault(job, []).append(int(number))
    return {job: sorted(numbers) for job, numbers in found.items()}


def choose(run_id: str | None, found: dict[str, list[int]], sure: bool = True) -> tuple[str, int]:
    """The job meant and one of its nodes here. Raises :class:`CtlError` when none or several fit.

    ``sure``: the one job that is found may be taken for the one meant, though it is not named.
    """
    if run_id is None and len(found) == 1:
        run_id = next(iter(found))
        if not sure:
            raise CtlError(f"the only job on this machine is {run_id!r}: to end it, give --run-id {run_id}, or --yes")
    if not found:
        meant = "no job runs" if run_id is None else f"job {run_id!r} does not run"
        raise CtlError(f"{meant} on this machine: give the command on a node of the job, or see ctl doctor")
    jobs = ", ".join(sorted(found))
    if run_id is None:
        raise CtlError(f"several jobs run on this machine: {jobs}; choose one with --run-id")
    name = job_name(run_id)
    if name not in found:
        raise CtlError(f"job {run_id!r} does not run on this machine; running: {jobs}")
    return run_id, found[name][0]


@overload
def ask(run_id: str, node: int, command: Status) -> JobStatus: ...


@overload
def ask(run_id: str, node: int, command: Drain | Stop | SaveCheckpoint | Admit | Reshape) -> Acceptance: ...


def ask(run_id: str, node: int, command: Command) -> JobStatus | Acceptance:
    """Send one command to an agent and return its answer. Raises :class:`CtlError`, also for a refusal."""
    reader = FrameReader(ANSWERS)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as console:
            console.settimeout(_SECONDS)
            console.connect(console_name(run_id, node))
            console.sendall(frame(JobRequest(job_name(run_id), command)))
            while data := console.recv(1 << 20):
                for answer in reader.feed(data):
                    if isinstance(answer, Refusal):
                        raise CtlError(answer.error)
                    return answer
    except ProtocolError:
        other = f"job {run_id!r} runs with another version of megatron-elastic, whose answer cannot be read here"
        raise CtlError(f"{other}; use the ctl of the environment that started it") from None
    except OSError as error:
        raise CtlError(f"the agent of job {run_id!r} does not answer: {error}") from None
    raise CtlError(
        f"the agent of job {run_id!r} closed the connection: only the user who started the job may use ctl, and only "
        "the ctl of the same version"
    )


def reshape(run_id: str, node: int, sizes: Reshape) -> ReshapeStatus:
    """Ask for other sizes and wait until they are in force. Raises :class:`CtlError`, also if they are refused."""
    before = ask(run_id, node, Status()).reshape.number
    ask(run_id, node, sizes)
    while True:
        found = ask(run_id, node, Status()).reshape
        if found.number > before and found.state == "refused":
            raise CtlError(f"reshape refused: {found.text}")
        if found.number > before and found.state == "in force":
            return found
        time.sleep(_LOOK_SECONDS)


_COMMANDS_OF = {
    "yes": ("drain", "stop"),
    "ranks": ("drain", "admit"),
    "json": ("status",),
    "watch": ("status",),
    "store": ("doctor",),
    **dict.fromkeys(("tp", "cp", "pp", "dp", "ep"), ("reshape",)),
}
"""Each flag that not every command takes → those that do."""


def _check_flags(args: argparse.Namespace) -> None:
    """Raises :class:`CtlError` for a flag that belongs to other commands."""
    for flag, commands in _COMMANDS_OF.items():
        given = getattr(args, flag)
        if args.do not in commands and given is not None and given is not False:
            why = ": stop ends the whole job" if (args.do, flag) == ("stop", "ranks") else ""
            raise CtlError(f"{args.do} takes no --{flag}{why}; it is for {' and '.join(commands)}")
    if args.watch is not None and not 0.1 <= args.watch <= 86400:
        raise CtlError(f"--watch takes seconds between 0.1 and 86400, got {args.watch:g}")


def _ranks(text: str | None) -> tuple[int, ...]:
    """The ranks that ``--ranks`` names, none without the flag. Raises ``ValueError`` if it names none, or no ranks."""
    if text is None:
        return ()
    ranks = tuple(int(rank) for rank in text.split(",") if rank)
    if not ranks or any(not 0 <= rank < 1 << 31 for rank in ranks):
        raise ValueError(f"{text!r} are no ranks")
    return ranks


def _command(do: str, ranks: tuple[int, ...]) -> Command:
    if do == "drain":
        return Drain(ranks)
    if do == "admit":
        return Admit(ranks)
    plain: dict[str, Command] = {"status": Status(), "stop": Stop(), "checkpoint": SaveCheckpoint()}
    return plain[do]


def _reshape(args: argparse.Namespace) -> int:
    """Raises :class:`CtlError`."""
    given = [size for size in (args.cp, args.ep) if size is not None]
    if min(size or 0 for size in (args.tp, args.pp, args.dp, *given)) < 1:
        raise CtlError("reshape takes --tp, --pp, --dp and perhaps --cp and --ep, each at least 1")
    run_id, node = choose(args.run_id, consoles())
    found = reshape(run_id, node, Reshape(args.tp, args.pp, args.dp, args.cp or 1, args.ep or 0))
    print(f"job {run_id}: {found.text}")
    return 0


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 refused or not found."""
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # of a reader that has seen enough, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush at the end
        return 0


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron.elastic.ctl", description="Talk to a running job.")
    parser.add_argument("do", choices=["status", "doctor", "drain", "stop", "admit", "checkpoint", "reshape"])
    parser.add_argument(
        "--run-id",
        default=None,
        help="Job to control: the launcher's --rdzv-id. Default: the only job on this machine.",
    )
    parser.add_argument(
        "--yes",
        action="store_true",
        help="For drain and stop: end the only job on this machine without naming it by --run-id.",
    )
    parser.add_argument("--ranks", help="For drain and admit: ranks, e.g. 4,5. Default: all.")
    parser.add_argument("--json", action="store_true", help="For status: print JSON, every field by its name.")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=_WATCH_SECONDS,
        metavar="SECONDS",
        help=f"For status: print it again and again until the job ends. Default: every {_WATCH_SECONDS:.0f} s.",
    )
    parser.add_argument(
        "--store",
        type=_place,
        metavar="HOST:PORT",
        help="For doctor: also check this address of the store (--master-addr and --master-port, or etcd's).",
    )
    for flag, axis in (("--tp", "tensor"), ("--pp", "pipeline"), ("--dp", "data")):
        parser.add_argument(
            flag, type=int, help=f"For reshape, required: {axis}-parallel size to go on with, at least 1."
        )
    parser.add_argument(
        "--cp", type=int, help="For reshape: context-parallel size to go on with, at least 1. Default: 1."
    )
    parser.add_argument(
        "--ep", type=int, help="For reshape: expert-parallel size to go on with, at least 1. Default: the launch's."
    )
    args = parser.parse_args(argv)
    try:
        _check_flags(args)
        if args.do == "doctor":
            return _doctor(args.run_id, args.store)
        if args.do == "reshape":
            return _reshape(args)
        command = _command(args.do, _ranks(args.ranks))
        run_id, node = choose(args.run_id, consoles(), sure=args.yes or args.do not in ("drain", "stop"))
        if isinstance(command, Status) and args.watch is not None:
            return _watch(run_id, node, args.watch, args.json)
        answer = ask(run_id, node, command)
    except ValueError:
        print(f"error: --ranks takes numbers like 4,5, got {args.ranks!r}", file=sys.stderr)
        return 1
    except CtlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if isinstance(answer, JobStatus) and not args.json:
        print("\n".join(status_lines(answer)))
    else:
        print(msgspec.json.format(encode(answer), indent=2).decode())
    return 0


def _place(text: str) -> tuple[str, int]:
    """Raises ``ValueError``, as argparse wants it."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(text)
    return host.strip("[]"), int(port)


def _doctor(run_id: str | None, store: tuple[str, int] | None) -> int:
    """Print all findings; 1 if something is missing."""
    asked = [ask_launcher(name, pid) for name, pids in _of_job(run_id, _listening(STARTS)).items() for pid in pids]
    starts = [start for start in asked if start is not None]
    jobs: list[JobStatus | str] = []
    for name, nodes in _of_job(run_id, consoles()).items():
        try:
            jobs.append(ask(name, nodes[0], Status()))
        except CtlError as error:
            jobs.append(str(error))
    findings = list(diagnose(starts, jobs, [] if store is None else [store]))
    print("\n".join(map(str, findings)))
    return int(any(finding.verdict == "missing" for finding in findings))


def _of_job(run_id: str | None, found: dict[str, list[int]]) -> dict[str, list[int]]:
    """The part of ``found`` that is of the job; all of it if none is named."""
    return found if run_id is None else {name: found[name] for name in (job_name(run_id),) if name in found}


def _watch(run_id: str, node: int, seconds: float, as_json: bool) -> int:
    """Print the status until the job is gone from this machine. JSON: one line each time."""
    while True:
        try:
            answer = ask(run_id, node, Status())
        except CtlError:
            if job_name(run_id) in consoles():
                raise
            print(f"job {run_id} has ended", file=sys.stderr)
            return 0
        if as_json:
            text = encode(answer).decode()
        else:
            text = (_CLEAR if sys.stdout.isatty() else "") + "\n".join(status_lines(answer)) + "\n"
        try:
            print(text, flush=True)
            time.sleep(seconds)
        except (KeyboardInterrupt, BrokenPipeError):
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
