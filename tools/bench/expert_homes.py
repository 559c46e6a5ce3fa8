"""Compares placements of experts: how evenly each loads the ranks, with the load that a job has measured.

    python -m tools.bench.expert_homes EVENTS --ranks 4 [--slots 5]

``EVENTS`` is the event log of a job without pipeline stages, whose ``--ranks`` share the experts of each layer. Of its
newest measured load (event ``experts``) each line has the tokens of the busiest rank in each layer, summed over layers,
relative to those of a mean rank:

launch      as Megatron deals experts: adjacent ones
homes       as ``--elastic-expert-balance homes`` would move them: the same in all layers
by layer    by the same swaps, in each layer by itself
replicas    as Lazarus places replicas (``plan/lazarus.py``) in ``--slots`` experts of a rank, in each layer by
            itself; the replicas of an expert have the same number of its tokens

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.elastic.observe.event_kinds import ExpertsEvent
from megatron.elastic.observe.events import read_events
from megatron.elastic.plan.expert_homes import Homes, Load, busiest, evened
from megatron.elastic.plan.lazarus import allocation
from tools.bench._common import print_result

__all__ = ["imbalances"]


def imbalances(load: Load, ranks: int, slots: int) -> dict[str, float]:
    """Return the load of the busiest rank relative to a mean one, by placement."""
    each = len(load[0]) // ranks
    launch: Homes = {rank: tuple(range(rank * each, (rank + 1) * each)) for rank in range(ranks)}
    mean = sum(map(sum, load)) / ranks
    return {
        "launch": busiest(load, launch) / mean,
        "homes": busiest(load, evened(load, launch)) / mean,
        "by layer": sum(busiest([layer], evened([layer], launch)) for layer in load) / mean,
        "replicas": sum(_of_replicas(layer, allocation(layer, ranks, slots)) for layer in load) / mean,
    }


def _of_replicas(layer: Sequence[int], homes: Sequence[Sequence[int]]) -> float:
    """Return the tokens of the busiest rank if the replicas of an expert share its tokens evenly."""
    count = [sum(expert in mine for mine in homes) for expert in range(len(layer))]
    return max(sum(layer[expert] / count[expert] for expert in mine) for mine in homes)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Compare placements of experts under a measured load.")
    parser.add_argument("events", type=Path, help="directory of the job's event log")
    parser.add_argument("--ranks", type=int, required=True, help="ranks that share the experts of a layer")
    parser.add_argument("--slots", type=int, help="experts of a rank with replicas; default: one more than without")
    args = parser.parse_args(words)
    measured = [record.event for record in read_events(args.events) if isinstance(record.event, ExpertsEvent)]
    if not measured:
        parser.error(f"{args.events}: no measured load; a job has one after 16 steps of experts that ranks share")
    load = list(measured[-1].tokens.values())
    if len(load[0]) % args.ranks:
        parser.error(f"--ranks {args.ranks} does not divide {len(load[0])} experts")
    found = imbalances(load, args.ranks, args.slots or len(load[0]) // args.ranks + 1)
    for name, value in found.items():
        print(f"{name:<12}{value:.3f}")
    print_result("expert homes", {"step": measured[-1].step, "ranks": args.ranks, "imbalance": found})


if __name__ == "__main__":
    main(sys.argv[1:])
