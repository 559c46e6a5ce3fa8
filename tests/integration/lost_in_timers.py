"""``pretrain_gpt.py`` in which rank ``LOST_RANK`` dies as the ranks gather their times of a timer for the second time.

``LOST_RANK_TIMER`` names it. By default that is how long their second save took, which Megatron gathers outside the
save; ``forward-backward`` is in the second log line. No named point is there, as it is no code of ours.
"""

from __future__ import annotations

import os
import runpy
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.elastic.control import env

ROOT = Path(__file__).resolve().parents[2]


def or_die(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's own, if this process lives."""
    timer, times = os.environ.get("LOST_RANK_TIMER", "save-checkpoint"), 0

    def replacement(timers: Any, names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        nonlocal times
        times += timer in names
        if times == 2 and os.environ["LOST_RANK"] == os.environ["RANK"] and os.environ[env.INCARNATION] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(timers, names, *args, **kwargs)

    return replacement


def arm() -> None:
    """Once the adaptor is there."""
    from megatron.core.timers import Timers

    Timers._get_elapsed_time_all_ranks = or_die(Timers._get_elapsed_time_all_ranks)


if __name__ == "__main__":
    import megatron.elastic.adaptor  # noqa: F401 - it patches Megatron

    arm()
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
