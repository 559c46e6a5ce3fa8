"""What a worker is told of the job's state: each thing once, and only what it does not know yet."""

from __future__ import annotations

from collections.abc import Callable

from megatron.elastic.control.generations import Generations
from megatron.elastic.control.wire import Message, address_to_json, decision_to_json
from megatron.elastic.launch.workers.pool import Worker

__all__ = ["brief"]


def brief(state: Generations, worker: Worker, tell: Callable[[Worker, Message], None]) -> None:
    """Freezes, decisions, wishes and, while it waits, the members; notes in ``worker`` what it was told."""
    mine = state.ranks[worker.rank]
    if not worker.elastic or mine.incarnation != worker.incarnation:
        return
    if mine.standing == "member" and state.frozen > max(worker.sent_frozen, state.decided):
        worker.sent_frozen = state.frozen
        tell(worker, {"t": "freeze", "g": state.frozen})
    decision = state.decision
    if decision is not None and decision.generation > worker.sent_decided:
        member = decision.members.get(worker.rank)
        if member is not None and member.incarnation == worker.incarnation:
            worker.sent_decided = decision.generation
            tell(worker, {"t": "decision", "decision": decision_to_json(decision)})
        elif member is None and decision.reason == "drain" and mine.standing == "done":
            worker.sent_decided = decision.generation
            tell(worker, {"t": "released"})
    if mine.standing == "waiting" and decision is not None and decision.generation > worker.sent_members:
        worker.sent_members = decision.generation
        members = [address_to_json(address) for address in decision.members.values()]
        tell(worker, {"t": "members", "members": members})
    pending = state.pending()
    if mine.standing == "member" and pending != worker.sent_pending:
        worker.sent_pending = pending
        tell(worker, {"t": "pending", "what": list(pending)})
