"""A job without training: workers that only keep their membership, to try a cluster out.

``python -m megatron.elastic.launch [torchrun arguments] -m megatron.elastic.launch.workers.rehearsal --seconds 30``

Each worker counts steps and prints one JSON line an event (generation decided,
frozen, step reached on losses), with CLOCK_MONOTONIC times. Kill, stop or restart
whatever you like meanwhile; survivors agree on generations as in a real job, and
lost workers come back. Nothing is computed and no link is opened.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from megatron.elastic.comm.address import Address
from megatron.elastic.comm.errors import GenerationChanged
from megatron.elastic.control.client import WorkerMembership
from megatron.elastic.control.exits import ExitCode
from megatron.elastic.control.membership import Activity, Decision
from megatron.elastic.control.requests import Request

__all__ = ["Rehearsal", "main"]


class Rehearsal:
    """One worker's loop over a membership."""

    def __init__(self, membership: WorkerMembership, report_seconds: float, patience: float) -> None:
        self._membership = membership
        self._report_seconds = report_seconds
        self._patience = patience
        self.step = 0

    def say(self, event: str, **fields: object) -> None:
        """Print one event, whole lines at once, so that several workers can share a pipe."""
        who = {"rank": self._membership.rank, "incarnation": self._membership.incarnation, "pid": os.getpid()}
        line = json.dumps({"event": event, **who, "step": self.step, "time": time.monotonic(), **fields})
        os.write(1, line.encode() + b"\n")

    def agree(self) -> Decision:
        """Report until a generation is decided."""
        membership = self._membership
        while True:
            if self._report_seconds:
                time.sleep(self._report_seconds)
            address = Address(membership.rank, membership.incarnation, membership.host)
            try:
                decision = membership.decide(address, json.dumps({"step": self.step}), self._patience)
            except GenerationChanged as change:
                self.say("again", generation=change.generation)
                continue
            steps = [json.loads(report)["step"] for report in decision.reports.values()]
            # Members are within a step of each other; all go on from the newest.
            self.step = max(steps, default=self.step)
            self.say(
                "decided",
                generation=decision.generation,
                reason=decision.reason,
                members=list(decision.members),
                joined=list(decision.joined),
                lost=[[loss.rank, loss.incarnation, loss.cause] for loss in decision.lost],
                left_out=list(decision.left_out),
            )
            return decision

    def run(self, seconds: float, step_seconds: float) -> int:
        """Count steps for ``seconds``; returns the exit code."""
        membership = self._membership
        membership.start(lambda generation: self.say("freeze", generation=generation))
        self.say("begin")
        decision = self.agree()
        asked = set[Request]()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            membership.publish(Activity(self.step, "step"))
            time.sleep(step_seconds)
            if membership.frozen() > decision.generation:
                decision, asked = self.agree(), set()
                continue
            self.step += 1
            pending = membership.pending()
            if pending.drain:
                self.say("drained")
                membership.finish(ExitCode.DRAINED)
                return ExitCode.DRAINED
            for due, request in ((pending.join, Request.JOIN), (pending.checkpoint, Request.CHECKPOINT)):
                if due and request not in asked:
                    self.say("asks", what=request)
                    membership.request(request)
                    asked.add(request)
        self.say("done")
        membership.finish(0)
        return 0


def main(argv: list[str]) -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="rehearsal", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--elastic", action="store_true", help="Accepted and ignored; makes the launcher treat the script as elastic."
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="Seconds to run after the start.")
    parser.add_argument("--step-seconds", type=float, default=0.02, help="Seconds a step takes.")
    parser.add_argument("--report-seconds", type=float, default=0.0, help="Seconds that a report takes in a recovery.")
    parser.add_argument("--patience", type=float, default=120.0, help="Seconds until an agreement times out.")
    args, _ = parser.parse_known_args(argv)
    rehearsal = Rehearsal(WorkerMembership.from_env(), args.report_seconds, args.patience)
    return rehearsal.run(args.seconds, args.step_seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
