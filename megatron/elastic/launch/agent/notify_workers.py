"""The messages to a worker about the job's state: each one once, and only what it does not know yet."""

from __future__ import annotations

from collections.abc import Callable

from megatron.elastic.control.generations import Generations
from megatron.elastic.control.messages import Begun, Decide, Freeze, Members, PendingChanged, Release, ToWorker
from megatron.elastic.launch.workers.pool import Worker

__all__ = ["notify_worker"]


def notify_worker(state: Generations, worker: Worker, tell: Callable[[Worker, ToWorker], None]) -> None:
    """To all the begin; to a member freezes, decisions and requests; to one that waits the members.

    Notes in ``worker`` what it was sent.
    """
    mine = state.ranks[worker.rank]
    if not worker.elastic:
        return
    if state.members and not state.preparing and not worker.sent_begun:
        worker.sent_begun = True
        tell(worker, Begun())
    if mine.incarnation != worker.incarnation:
        return
    if mine.standing == "member" and state.frozen > max(worker.sent_frozen, state.decided):
        worker.sent_frozen = state.frozen
        tell(worker, Freeze(state.frozen))
    decision = state.decision
    if decision is not None and decision.generation > worker.sent_decided:
        member = decision.members.get(worker.rank)
        if member is not None and member.incarnation == worker.incarnation:
            worker.sent_decided = decision.generation
            tell(worker, Decide(decision))
        elif member is None and decision.reason == "drain" and mine.standing == "done":
            worker.sent_decided = decision.generation
            tell(worker, Release())
    if mine.standing == "waiting" and decision is not None and decision.generation > worker.sent_members:
        worker.sent_members = decision.generation
        tell(worker, Members(decision.members))
    if mine.standing == "member":
        pending = state.pending()
        if pending != worker.sent_pending:
            worker.sent_pending = pending
            tell(worker, PendingChanged(pending))
