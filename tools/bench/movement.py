"""State moved by a change of membership, against the least that any balanced layout needs.

    python -m tools.bench.movement [--changes 1000] [--ranks 8] [--units 24] [--blocks 48] [--seed 0]

A job of data-parallel ranks goes through random losses and returns. For each
change: the optimizer blocks that must move before the next step (none: mirrors are
promoted), those re-mirrored and re-balanced in the background, and two lower bounds
on the latter:

- ``owners``: copies lost to the change that k mirrors need again, or what a rank
  must receive to own its share, whichever is more;
- ``copies``: the same where owners and mirrors are both balanced (every rank holds
  its share of copies).

Beside it, in the same run, what Megatron's distributed optimizer layout would move:
each unit cut into as many contiguous ranges as there are ranks, in rank order
(``contiguous``), with the same mirrors.

Then a layer that moves from one pipeline stage to the next, both of several ranks, under either ownership
(``--elastic-ownership``): blocks that move, sent by the busiest rank and received by the busiest. With links alike, one
a rank, the larger of the two is the time it takes (interleaved ZeRO, arXiv 2510.00606; there without mirrors).

Pure: no process, no wall-clock in the claims. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.elastic.state.layout import BlockKey, StateBlock
from megatron.elastic.state.ownership import Copies, Placement, Rules, UnitGroup, initial, promote_only, rebalance
from megatron.elastic.state.placement import Ownership
from tools.bench._common import print_result

ELEMENTS = 65536


@dataclass
class Tally:
    """Sums over all changes, in blocks."""

    before_next_step: int = 0
    moved: int = 0
    bound_owners: int = 0
    bound_copies: int = 0
    contiguous: int = 0
    worst_unit_spread: int = 0
    worst_rank_share: float = 0.0
    worst_mirror_share: float = 0.0
    worst_held_share: float = 0.0
    seconds_promote: list[float] = field(default_factory=list)
    seconds_rebalance: list[float] = field(default_factory=list)


def job(units: int, blocks: int, ranks: Sequence[int]) -> list[UnitGroup]:
    """Unit groups of a data-parallel job: every rank holds every unit."""
    edges = [ELEMENTS * i for i in range(blocks + 1)]
    return [
        UnitGroup(u, 0, tuple(StateBlock(u, 0, i, *edges[i : i + 2]) for i in range(blocks)), tuple(ranks))
        for u in range(units)
    ]


def lower_bounds(before: Mapping[BlockKey, Copies], groups: Sequence[UnitGroup], mirrors: int) -> tuple[int, int]:
    """(owners balanced, owners and mirrors balanced): fewest adds that reach any such layout."""
    owners = copies = 0
    for group in groups:
        alive = frozenset(group.holders)
        held = {block.key: [r for r in before[block.key].ranks if r in alive] for block in group.blocks}
        have = Counter(rank for ranks in held.values() for rank in ranks)
        due = 1 + min(mirrors, len(alive) - 1)
        short = sum(max(0, due - len(ranks)) for ranks in held.values())
        share = len(group.blocks) // len(alive)
        mirrored = (due - 1) * len(group.blocks) // len(alive)
        owners += max(short, sum(max(0, share - have[rank]) for rank in alive))
        copies += max(short, sum(max(0, share + mirrored - have[rank]) for rank in alive))
    return owners, copies


def contiguous(groups: Sequence[UnitGroup], mirrors: int) -> dict[BlockKey, Copies]:
    """Each unit in rank-ordered contiguous ranges, mirrored to the next ranks, as after a rebuild by rank order."""
    copies = {}
    for group in groups:
        n, holders = len(group.blocks), group.holders
        m = len(holders)
        for i, block in enumerate(group.blocks):
            j = i * m // n
            chain = [holders[(j + d) % m] for d in range(1 + min(mirrors, m - 1))]
            copies[block.key] = Copies(chain[0], tuple(chain[1:]))
    return copies


def adds(before: Mapping[BlockKey, Copies], now: Mapping[BlockKey, Copies], alive: frozenset[int]) -> int:
    """Copies of ``now`` at ranks that had none among the survivors of ``before``."""
    return sum(len(set(copies.ranks) - (set(before[key].ranks) & alive)) for key, copies in now.items())


def change(rng: random.Random, alive: frozenset[int], ranks: int) -> frozenset[int]:
    """One rank more or less, at least two left."""
    leave = len(alive) == ranks or (len(alive) > 2 and rng.random() < 0.5)
    if leave:
        return alive - {rng.choice(sorted(alive))}
    return alive | {rng.choice([r for r in range(ranks) if r not in alive])}


def measure(args: argparse.Namespace) -> Tally:
    """Drive the random changes; raises when a block is lost or a layout out of balance."""
    rng, tally = random.Random(args.seed), Tally()
    alive = frozenset(range(args.ranks))
    groups = job(args.units, args.blocks, sorted(alive))
    placement = initial(groups, Rules(args.mirrors, args.scatter, dict.fromkeys(alive, 0)))
    by_order: Mapping[BlockKey, Copies] = contiguous(groups, args.mirrors)
    for _ in range(args.changes):
        alive = change(rng, alive, args.ranks)
        groups = job(args.units, args.blocks, sorted(alive))
        rules = Rules(args.mirrors, args.scatter, dict.fromkeys(sorted(alive), 0))
        bounds = lower_bounds(placement.copies, groups, args.mirrors)
        started = time.perf_counter()
        first = promote_only(placement, alive, groups)
        promoted = time.perf_counter()
        if first.lost:
            raise RuntimeError(f"seed {args.seed}: lost {first.lost[:3]}")
        placement, changes = rebalance(first.placement, groups, rules)
        tally.seconds_rebalance.append(time.perf_counter() - promoted)
        tally.seconds_promote.append(promoted - started)
        tally.before_next_step += sum(item.kind == "add" for item in first.transitions)
        tally.moved += sum(item.kind == "add" for item in changes)
        tally.bound_owners += bounds[0]
        tally.bound_copies += bounds[1]
        after = contiguous(groups, args.mirrors)
        tally.contiguous += adds(by_order, after, alive)
        by_order = after
        spread(tally, placement, groups, alive)
    return tally


def spread(tally: Tally, placement: Placement, groups: Sequence[UnitGroup], alive: frozenset[int]) -> None:
    """Worst imbalance so far: blocks within a unit, owned and mirrored share over ranks."""
    for group in groups:
        loads = Counter(placement.owner(block.key) for block in group.blocks)
        tally.worst_unit_spread = max(tally.worst_unit_spread, max(loads.values()) - min(loads[r] for r in alive))
    owned = Counter(copies.owner for copies in placement.copies.values())
    mirrored = Counter(rank for copies in placement.copies.values() for rank in copies.mirrors)
    shares = ((owned, "worst_rank_share"), (mirrored, "worst_mirror_share"), (owned + mirrored, "worst_held_share"))
    for counts, name in shares:
        mean = sum(counts.values()) / len(alive)
        off = max(counts.values()) / mean - 1.0 if mean else 0.0
        setattr(tally, name, max(getattr(tally, name), off))


def stages(cut: int, layers: int, blocks: int, data: int) -> list[UnitGroup]:
    """Two stages of ``data`` ranks each, the first with ``cut`` of ``layers`` layers."""
    homes = tuple(range(data)), tuple(range(data, 2 * data))
    return [replace(group, holders=homes[group.unit >= cut]) for group in job(layers, blocks, homes[0])]


def layer_moves(layers: int, blocks: int, data: int, mirrors: int, ownership: Ownership) -> dict[str, int]:
    """Blocks moved when the last layer of the first stage of ``data`` ranks passes to the second stage."""
    rules = Rules(mirrors, 4, {rank: rank for rank in range(2 * data)}, ownership)
    placement = initial(stages(layers // 2, layers, blocks, data), rules)
    _, changes = rebalance(placement, stages(layers // 2 - 1, layers, blocks, data), rules)
    moved = [item for item in changes if item.kind == "add"]
    sent, received = Counter(item.source for item in moved), Counter(item.rank for item in moved)
    return {"blocks": len(moved), "busiest_sends": max(sent.values()), "busiest_receives": max(received.values())}


def measured_layers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A layer of a stage of 2, 4 and 8 ranks, without mirrors and with ``--mirrors``, printed as a table."""
    found: list[dict[str, Any]] = []
    for data in (2, 4, 8):
        for mirrors in sorted({0, args.mirrors}):
            dealt = layer_moves(args.units, args.blocks, data, mirrors, "interleaved")
            cut = layer_moves(args.units, args.blocks, data, mirrors, "contiguous")
            busiest, there = (max(moved["busiest_sends"], moved["busiest_receives"]) for moved in (dealt, cut))
            saved = 1.0 - busiest / there
            print(
                f"  a layer of a stage of {data}, {mirrors} mirrors: busiest rank {busiest} blocks interleaved,"
                f" {there} contiguous: {saved:.0%} less"
            )
            found.append({"data": data, "mirrors": mirrors, "interleaved": dealt, "contiguous": cut, "saved": saved})
    return found


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"changes": 1000, "ranks": 8, "units": 24, "blocks": 48, "mirrors": 1, "scatter": 4}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tally = measure(args)
    print(f"{args.changes} changes of {args.ranks} ranks, {args.units} units of {args.blocks} blocks, seed {args.seed}")
    print(f"  moved before the next step   {tally.before_next_step:10d} blocks")
    print(f"  moved in the background      {tally.moved:10d} blocks")
    print(f"    at least (owners, k copies){tally.bound_owners:10d}")
    print(f"    at least (copies balanced) {tally.bound_copies:10d}   ratio {tally.moved / tally.bound_copies:.3f}")
    print(f"    rank-ordered ranges        {tally.contiguous:10d}   ratio {tally.contiguous / tally.moved:.2f}")
    print(f"  within a unit max - min <=   {tally.worst_unit_spread:10d} blocks")
    print(
        f"  owned by a rank, over mean   {tally.worst_rank_share:10.2%}   mirrored {tally.worst_mirror_share:.2%}"
        f"   both {tally.worst_held_share:.2%}"
    )
    layers = measured_layers(args)
    print_result(
        "movement",
        {
            "changes": args.changes,
            "ranks": args.ranks,
            "units": args.units,
            "blocks": args.blocks,
            "mirrors": args.mirrors,
            "scatter": args.scatter,
            "seed": args.seed,
            "blocks_before_next_step": tally.before_next_step,
            "blocks_moved": tally.moved,
            "bound_owners": tally.bound_owners,
            "bound_copies": tally.bound_copies,
            "ratio_to_bound": tally.moved / tally.bound_copies,
            "blocks_moved_contiguous": tally.contiguous,
            "max_minus_min_in_a_unit": tally.worst_unit_spread,
            "owned_over_mean": tally.worst_rank_share,
            "mirrored_over_mean": tally.worst_mirror_share,
            "held_over_mean": tally.worst_held_share,
            "promote_ms_median": 1e3 * statistics.median(tally.seconds_promote),
            "rebalance_ms_median": 1e3 * statistics.median(tally.seconds_rebalance),
            "layer_moves": layers,
        },
    )


if __name__ == "__main__":
    main()
