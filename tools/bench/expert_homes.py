"""Compares placements of experts: how evenly each loads the ranks, with the load that a job has measured.

    python -m tools.bench.expert_homes EVENTS --ranks 4 [--replicas 1] [--hot 2]

``EVENTS`` is the event log of a job without pipeline stages, whose ``--ranks`` share the experts of each layer. Of its
newest measured load (event ``experts``) each line has the tokens of the busiest rank in each layer, summed over layers,
relative to those of a mean rank, and the number of replicas beyond one home an expert:

launch        as Megatron deals experts: adjacent ones
homes         as ``--elastic-expert-balance homes`` would move them: the same in all layers
by layer      by the same swaps, in each layer by itself
replicas      as ``replicas`` would, with ``--replicas`` more experts on a rank: the same in all layers
lazarus       as ``lazarus`` would, with as many: the same in all layers
by layer, r   as ``replicas`` would in each layer by itself
by layer, l   as ``lazarus`` would in each layer by itself

``--hot`` gives the hottest expert of each layer that many times the tokens of a mean rank, taken from no other expert:
an expert that no home helps. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.elastic.observe.event_kinds import ExpertsEvent
from megatron.elastic.observe.events import read_events
from megatron.elastic.plan.expert_homes import Homes, Load, busiest, evened
from megatron.elastic.plan.expert_replicas import Room, replicated, slots
from megatron.elastic.plan.lazarus import homes_of
from tools.bench._common import print_result

__all__ = ["heated", "imbalances"]

Policy = Callable[[Load], Homes]


def imbalances(load: Load, ranks: int, replicas: int) -> dict[str, tuple[float, int]]:
    """Return (load of the busiest rank relative to a mean one, replicas of a rank beyond its share), by placement.

    Both are means over layers where each layer has homes of its own.
    """
    each = len(load[0]) // ranks
    launch: Homes = {rank: tuple(range(rank * each, (rank + 1) * each)) for rank in range(ranks)}
    room = Room(each, min(len(load[0]), each + replicas))

    def of(policy: Policy) -> tuple[float, int]:
        homes = policy(load)
        return _relative(load, homes), slots(homes) - len(load[0])

    def by_layer(policy: Policy) -> tuple[float, int]:
        mean = sum(map(sum, load))
        found = [policy([layer]) for layer in load]
        most = sum(busiest([layer], homes) for layer, homes in zip(load, found, strict=True))
        return most * ranks / mean, max(slots(homes) for homes in found) - len(load[0])

    return {
        "launch": of(lambda load: launch),
        "homes": of(lambda load: evened(load, launch)),
        "by layer": by_layer(lambda load: evened(load, launch)),
        "replicas": of(lambda load: replicated(load, launch, room)),
        "lazarus": of(lambda load: homes_of(load, launch, room)),
        "by layer, r": by_layer(lambda load: replicated(load, launch, room)),
        "by layer, l": by_layer(lambda load: homes_of(load, launch, room)),
    }


def _relative(load: Load, homes: Homes) -> float:
    return busiest(load, homes) * len(homes) / sum(map(sum, load))


def heated(load: Load, ranks: int, times: float) -> list[list[int]]:
    """Return the load in which the hottest expert of each layer has ``times`` the tokens of a mean rank."""
    found = [list(layer) for layer in load]
    for layer in found:
        hot, others = max(range(len(layer)), key=layer.__getitem__), sum(layer) - max(layer)
        share = min(times / ranks, 0.99)
        layer[hot] = round(others * share / (1 - share))
    return found


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Compare placements of experts under a measured load.")
    parser.add_argument("events", type=Path, help="directory of the job's event log")
    parser.add_argument("--ranks", type=int, required=True, help="ranks that share the experts of a layer")
    parser.add_argument("--replicas", type=int, default=1, help="experts of a rank above its share; default: 1")
    parser.add_argument("--hot", type=float, help="tokens of the hottest expert of a layer, in those of a mean rank")
    args = parser.parse_args(words)
    measured = [record.event for record in read_events(args.events) if isinstance(record.event, ExpertsEvent)]
    if not measured:
        parser.error(f"{args.events}: no measured load; a job has one after 16 steps of experts that ranks share")
    load: Load = list(measured[-1].tokens.values())
    if len(load[0]) % args.ranks:
        parser.error(f"--ranks {args.ranks} does not divide {len(load[0])} experts")
    if args.hot is not None:
        load = heated(load, args.ranks, args.hot)
    found = imbalances(load, args.ranks, args.replicas)
    for name, (value, more) in found.items():
        print(f"{name:<14}{value:.3f}{more:>6}")
    result = {name: {"imbalance": value, "replicas": more} for name, (value, more) in found.items()}
    print_result("expert homes", {"step": measured[-1].step, "ranks": args.ranks, "placements": result})


if __name__ == "__main__":
    main(sys.argv[1:])
