"""Runs jobs of ``pretrain_gpt.py`` with every rank forked from one process that has imported it all.

    python tests/integration/forked_ranks.py jobs.json

``jobs.json``: a list of ``{"name", "world", "arguments", "seconds", "environ"}``. For each job,
in order, ``world`` ranks are forked with torchrun's environment variables and run
``pretrain_gpt.main()``; their output goes to ``<name>.<rank>.log`` beside the file.
The last line printed is ``{"name": [exit code of each rank]}`` as JSON; a rank that
outlives ``seconds`` is killed and counts as 124. Importing torch and Megatron costs
seconds a process: this pays it once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import pretrain_gpt
from tests.integration.ports import free_port

TIMED_OUT = 124


def run_rank(job: dict[str, Any], rank: int, port: int, log: Path) -> NoReturn:
    """The forked child: becomes rank ``rank`` and never returns."""
    code = 1
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(job["world"]),
            LOCAL_WORLD_SIZE=str(job["world"]),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            **job.get("environ", {}),
        )
        sys.argv = ["pretrain_gpt.py", *job["arguments"]]
        pretrain_gpt.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exc()
    finally:
        for child in multiprocessing.active_children():  # os._exit below skips what would end them
            child.terminate()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_job(job: dict[str, Any], folder: Path) -> list[int]:
    """Fork the ranks, wait for them, return their exit codes."""
    port = free_port()
    children: list[int] = []
    for rank in range(job["world"]):
        child = os.fork()
        if child == 0:
            run_rank(job, rank, port, folder / f"{job['name']}.{rank}.log")
        children.append(child)
    deadline = time.monotonic() + job["seconds"]
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child in codes:
                continue
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                codes[child] = TIMED_OUT
                continue
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return [codes[child] for child in children]


def main(path: Path) -> None:
    """All jobs of the file, one after the other."""
    results: dict[str, list[int]] = {}
    for job in json.loads(path.read_text()):
        results[job["name"]] = run_job(job, path.parent)
        print(job["name"], results[job["name"]], file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
