"""The wait for ranks of a stage that no survivor can compute, although its state survives (docs/design.md §4, §6).

This happens if all ranks of a stage are lost but mirrors of its blocks are on other ranks,
or if every tensor-parallel group of a stage has lost a member. The members then keep their
state and request at once, not at a boundary, the admission of ranks that are being started
again. Each admission is a generation of its own. Work goes on with the first generation in
which every unit has a whole tensor-parallel group.

Members do not wait for ranks that are not started again if other ranks can take over their
layers (``Agreement.agree``). If that becomes known later, a waiting member requests another
decision.

The limit is the time that an unknown phase may last (``control.timing``), because a
newcomer's start is such a phase. A request to drain does not end the wait: without these
ranks no complete state can be saved, and with them the job drains at the next boundary. If
the wait exceeds the notice, the launcher ends the job and names the missing ranks.
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
    membership: Membership,
    gone: StageGone,
    step: int,
    respawn: bool,
    detection_timeout: float,
    say: Callable[[str], None],
    threads: Threads = OS_THREADS,
) -> None:
    """Request newcomers until a newer generation is frozen. Raises ``PlanError`` when none is to be expected.

    ``say``: logs one line for the user.
    """
    if not respawn:
        raise gone.final("lost ranks are not started again (--no-elastic-respawn)")
    patience = Timing.derive(detection_timeout).hang_unknown
    end, asked, leaving = threads.monotonic() + patience, set[Request](), False
    started = set(gone.missing) & set(gone.decision.returning)
    hint = "" if started else " (none is being started now: start an agent on their node, or use ctl admit)"
    say(f"{gone}: waiting up to {patience:.0f} s for these ranks to be started again{hint}")
    while membership.frozen() <= gone.decision.generation:
        pending = membership.pending()
        if pending.drain and not leaving:
            leaving = True
            say(f"the job was asked to save and end, but cannot save before ranks {list(gone.missing)} are back")
        for due, request in ((pending.join, Request.JOIN), (pending.reform, Request.REFORM)):
            if due and request not in asked:
                asked.add(request)
                membership.request(request)
        if threads.monotonic() > end:
            raise gone.final(f"they did not come back within {patience:.0f} s (--elastic-detection-timeout × 600)")
        membership.publish(Activity(step, WAITING_FOR_RANKS, gone.missing))
        threads.sleep(_LOOK_SECONDS)
