"""The way back to a checkpoint when no state is left in memory: one line for the job, and one event of each rank.

Ranks that are left tell of it and end (:mod:`shutdown`). Where all ranks ended at once, those that are started next
tell of it before they load a checkpoint (:func:`tell`): no job begins with its first step again as if it had not run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from megatron.elastic.control import env
from megatron.elastic.mcore.checkpoint.save_points import step_to_go_back_to
from megatron.elastic.observe.event_kinds import RecoveryEvent
from megatron.elastic.runtime.connect import Links

__all__ = ["NothingSaved", "WayBack", "tell"]


class NothingSaved(RuntimeError):
    """All ranks ended at once, and there is no checkpoint to go on from."""


@dataclass(frozen=True)
class WayBack:
    """``step``: of the checkpoint; ``committed``: the newest step known to be committed."""

    why: str
    step: int
    committed: int

    @property
    def event(self) -> RecoveryEvent:
        """For the event log."""
        lost = max(0, self.committed - self.step)
        return RecoveryEvent(step=self.step + 1, outcome="checkpoint", seconds={}, lost_steps=lost)

    @property
    def line(self) -> str:
        """For the log of the job."""
        again = f"steps {self.step + 1} to {self.committed} are computed again"
        lost = again if self.event.lost_steps else "no step is lost"
        return f"{self.why}: the job goes back to its last checkpoint, of step {self.step} (--load); {lost}"


def tell(links: Links, args: Any) -> None:
    """Print from where the job goes on if all its ranks ended at once before this start.

    Raises :class:`NothingSaved`, on every rank, if that is the first step.
    """
    ended_in = int(os.environ.get(env.ENDED_IN, "-1"))
    if ended_in < 0 or links.decision is None:
        return
    why, step = f"all ranks ended at once, in step {ended_in}", step_to_go_back_to(args)
    if step is None:
        raise NothingSaved(f"{why}, and --load has no checkpoint: the job ends, since it would begin with step 1 again")
    back = WayBack(why, step, ended_in - 1)
    links.events.write(back.event)
    if links.fabric.rank == links.fabric.alive[0]:
        print(back.line, flush=True)
