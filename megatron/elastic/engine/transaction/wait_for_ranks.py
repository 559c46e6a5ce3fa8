"""A stage nobody can compute, although its state survives: wait for its ranks to come back (docs/design.md §4, §6).

When both ranks of a stage die and mirrors of its blocks lie elsewhere, or when every
tensor-parallel group of a stage has lost a member, nothing is lost but the means to
compute. Members then keep what they hold and ask, at once and not at a boundary, for
whoever is being started again to be let in. Each admission is a generation of its own;
the first in which every unit has a whole tensor-parallel group goes on with the step.

Ranks that are not started again are not waited for where others can take their layers
over (``Recovery.agree``). When that becomes known later, a member that waits asks for
another decision, which says so.

Bounded by the time a phase may last that was never seen to end (``control.timing``),
since a newcomer's start is such a phase. A request to drain does not end it: without
these ranks there is nothing to save, with them the job drains at the next boundary;
the launcher ends it, saying for whom it waited, when that takes longer than its notice.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.elastic.control.membership import WAITING_FOR_RANKS, Activity, Membership
from megatron.elastic.control.requests import Request
from megatron.elastic.control.timing import Timing
from megatron.elastic.engine.generation.factory import StageGone
from megatron.elastic.platform.threads import OS_THREADS, Threads

__all__ = ["await_ranks"]

_LOOK_SECONDS = 0.02


def await_ranks(
    membership: Membership, gone: StageGone, step: int, respawn: bool, detection_timeout: float,
    say: Callable[[str], None], threads: Threads = OS_THREADS,
) -> None:
    """Ask for newcomers until a newer generation is frozen. Raises ``PlanError`` when none is to be expected.

    ``say``: one line about what is going on.
    """  # fmt: skip
    if not respawn:
        raise gone.final("lost ranks are not started again (--no-elastic-respawn)")
    patience = Timing.derive(detection_timeout).hang_unknown
    end, asked, leaving = threads.monotonic() + patience, set[Request](), False
    started = set(gone.missing) & set(gone.decision.returning)
    hint = "" if started else " (none of them is at present: a new agent of their node, or ctl admit, would do it)"
    say(f"{gone}: waiting up to {patience:.0f} s until they are started again{hint}")
    while membership.frozen() <= gone.decision.generation:
        pending = membership.pending()
        if pending.drain and not leaving:
            leaving = True
            say(f"the job is to save and end, but nothing can be saved before ranks {list(gone.missing)} are back")
        for due, request in ((pending.join, Request.JOIN), (pending.reform, Request.REFORM)):
            if due and request not in asked:
                asked.add(request)
                membership.request(request)
        if threads.monotonic() > end:
            raise gone.final(f"they did not come back within {patience:.0f} s (--elastic-detection-timeout × 600)")
        membership.publish(Activity(step, WAITING_FOR_RANKS, gone.missing))
        threads.sleep(_LOOK_SECONDS)
