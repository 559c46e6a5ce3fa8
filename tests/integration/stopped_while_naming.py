"""``pretrain_gpt.py`` in which rank ``STOPPED_RANK`` and its launcher stop as that rank is about to name a checkpoint.

As when the whole node stops: nobody there is left to end the process, and what it does next
it does when it is woken up.
"""

from __future__ import annotations

import os
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.elastic.control import env

ROOT = Path(__file__).resolve().parents[2]


def ancestors(pid: int) -> list[int]:
    """The processes above ``pid`` that are launchers of this job."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    if not Path(f"/proc/{parent}/comm").read_text().startswith("elastic-"):
        return []
    return [parent, *ancestors(parent)]


def or_stop(commit: Callable[..., int], at: int) -> Callable[..., int]:
    """Megatron has written all it writes; the ``at``-th time the node stops first."""
    times = 0

    def replacement(*args: Any) -> int:
        nonlocal times
        times += 1
        mine = os.environ["STOPPED_RANK"] == os.environ["RANK"] and os.environ[env.INCARNATION] == "0"
        if times == at and mine:
            print(f"node of process {os.getpid()} stops", flush=True)
            for launcher in reversed(ancestors(os.getpid())):
                os.kill(launcher, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        return commit(*args)

    return replacement


if __name__ == "__main__":
    import megatron.elastic.adaptor  # noqa: F401 - it patches Megatron
    from megatron.elastic.mcore.checkpoint.background_save import Folders

    Folders.commit = or_stop(Folders.commit, 2)  # type: ignore[method-assign]
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
