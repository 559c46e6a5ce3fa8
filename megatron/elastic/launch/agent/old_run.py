"""The end of an earlier run of the job, whose entries are still in etcd.

An agent that is started in a taken place waits until the other agents count its node as lost. Where all agents were
killed at once, none is left to do so, and each new agent would keep the old run's entries alive. So an agent first
looks for a lease that changes. If none does, it stops keeping the entries alive, waits until they have expired, and
meets the others in a new run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from megatron.elastic.control.exits import ExitCode
from megatron.elastic.control.store import Store, StoreLost
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.agent_place import AgentPlace
from megatron.elastic.launch.messages import say

__all__ = ["PlaceWait", "await_end"]


class _Leases:
    """The leases of some nodes in the store."""

    def __init__(self, store: Store, nodes: Iterable[int], timing: Timing) -> None:
        self._store, self._timing = store, timing
        self._keys = [f"lease/{node}" for node in nodes]
        self._first = store.get_many(self._keys)

    def renewed(self) -> bool:
        """Return whether one has changed since the first read, after a pause."""
        time.sleep(self._timing.beat / 2)
        return any(value not in (None, self._first[key]) for key, value in self._store.get_many(self._keys).items())

    def renewed_within(self, seconds: float) -> bool:
        """Return whether one changes within ``seconds``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.renewed():
                return True
        return False


def await_end(
    store: Store, nodes: Iterable[int], timing: Timing, waiting_for: Callable[[str], AbstractContextManager[None]]
) -> bool:
    """Return False if an agent of the run in ``store`` lives; else wait for the end of that run and return True.

    The entries of the run are no longer kept alive by this agent then, and it has to meet the others again.
    ``waiting_for(what)``: tells the user inside the block.
    """
    leases, launch = _Leases(store, nodes, timing), store.get("launch")
    if leases.renewed_within(timing.lease):
        return False
    store.close()
    with waiting_for(f"{store.keeper} to forget an earlier run of this job, of which no launcher lives"):
        while store.get("launch") == launch and not leases.renewed():
            pass
    return True


@dataclass
class PlaceWait:
    """The wait of an agent for a node's place that another agent has, and its end without success."""

    place: AgentPlace
    run_id: str
    over: Callable[[], bool]
    """Return whether this agent has the place, or ends."""
    stop: Callable[[int], None]
    """End this agent with that exit code."""

    def start(self) -> None:
        """Give the other agents time to count the node as lost."""
        self.place.loop.after(2 * self.place.timing.lease, self._time_out)

    def _time_out(self) -> None:
        if not self.over():
            threading.Thread(target=self._look, name="place-wait", daemon=True).start()

    def _look(self) -> None:
        timing = self.place.timing
        with suppress(StoreLost):  # the journal's follower tells the loop
            taken = _Leases(self.place.store.clone(), [self.place.node], timing).renewed_within(timing.lease)
            self.place.loop.post(lambda: self._give_up(taken))

    def _give_up(self, taken: bool) -> None:
        if self.over():
            return
        node, job = self.place.node, f"job {self.run_id!r}"
        if taken:
            say(f"--node-rank {node} is already taken by another agent of {job}: choose another number")
            self.stop(ExitCode.FAILED)
        else:
            say(f"node {node}: the agents of {job} have ended while this one waited for its place: start it again")
            self.stop(ExitCode.STATE_LOST)
