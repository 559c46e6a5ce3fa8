"""Restores a device's clocks when the process that set them is gone. Runs as a process of its own, without torch.

    python -m megatron.elastic.platform.frequency_guard OWNER KIND DEVICE PATH SNAPSHOT

``OWNER`` is a pidfd: readable when the owner is dead. The guard opens the driver, claims its clocks and finds them
still as in ``SNAPSHOT``; then it writes "ready" to standard output, else the reason, and ends. One byte on standard
input says that the owner has restored by itself. Signals that end a job do not end the guard: it ends with its owner.
"""

from __future__ import annotations

import os
import select
import signal
import sys

from megatron.elastic._frequency import NotPermitted, Unavailable
from megatron.elastic.platform.frequency import open_driver


def guard(owner: int, kind: str, device: str, path: str, snapshot: str) -> None:
    """Wait for the owner's end or its byte. Raises what restoring raises."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    try:
        driver = open_driver(kind, device, path)
        driver.claim()
        said = "ready" if driver.snapshot() == snapshot else "another process set these clocks meanwhile"
    except (Unavailable, NotPermitted, ValueError) as error:
        said = str(error)
    print(said, flush=True)
    if said != "ready":
        return  # nothing will be set
    watched, standard_input = select.poll(), sys.stdin.fileno()
    watched.register(owner, select.POLLIN)
    watched.register(standard_input, select.POLLIN)
    while True:
        ready = dict(watched.poll())
        if standard_input in ready:
            if os.read(standard_input, 1):
                return
            # A closed standard input is no evidence of the owner's end: only the pidfd is.
            watched.unregister(standard_input)
        if owner in ready:
            driver.restore(snapshot)
            print(f"clocks of {kind} device {device} restored: their owner is gone", file=sys.stderr, flush=True)
            return


if __name__ == "__main__":
    guard(int(sys.argv[1]), *sys.argv[2:6])
