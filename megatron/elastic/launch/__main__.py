"""``python -m megatron.elastic.launch [torchrun arguments] script.py [script arguments]``.

Like torchrun, but the loss of a worker ends neither the others nor the job. See
``--help`` and docs/; exit codes: 0 done, 1 bad input, 3 drained and saved: requeue,
4 state lost, 5 deterministic failure: do not requeue.
"""

from __future__ import annotations

import os
import sys

from megatron.elastic.launch.early_signals import EarlySignals

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Run one node's agent to the end of the job."""
    signals = EarlySignals(elastic="--elastic" in argv)
    # OpenMP reads it when torch is loaded, and a zygote forked from here loads no torch of its own.
    threads_given = "OMP_NUM_THREADS" in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from megatron.elastic.launch.run import run  # imports torch, which takes seconds

    return run(argv, signals, threads_given)


if __name__ == "__main__":
    # _exit: daemon threads may wait in the store or for the console, and all is flushed.
    os._exit(main(sys.argv[1:]))
