"""A mixture of experts that loses ranks, beside the dense model of as many active parameters.

    python -m tools.bench.experts [--losses 4] [--ranks 8]

Two real jobs under the launcher in turn, default settings: pipeline 2, the rest data parallel. In the mixture all ranks
of a stage share eight experts, of which a token takes two; an expert is half as wide as the dense model's MLP.
Ranks of both stages are lost one after the other (``tools/bench/recovery.py``), and return.

recovering  from the signal until the slowest survivor goes on with the step
overhead    from the signal to the next committed step, less a normal step; the rest of that step has a rank fewer
recover     the same with that step: the time to recover
absent      from the signal until the first step that all ranks commit again
returning   by how much the step in which a rank is back took longer than a normal one

``kept`` is the planner's rate after one loss, of the job's own crews and of crews of two, with the same cost for every
layer, exchanges for nothing, and a ghost taken for a micro-batch. Beside it stands the rate where the crew that lost a
rank computes nothing any more. ``ettr`` is the share of the time that trains at one loss every ten minutes: a loss
costs its overhead and what its return costs, and meanwhile the job has the rate ``kept``. MoEvement reports 0.94 at
that frequency for its own testbed (arXiv 2412.15411).

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass, replace

from megatron.elastic.observe.events import EventRecord
from megatron.elastic.plan.cost import plan_costs
from megatron.elastic.plan.crews import crewed
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.planner import uniform_profile
from megatron.elastic.plan.policies.registry import choice_of, policy_named
from megatron.elastic.plan.schedule.timing import walk
from megatron.elastic.plan.topology import regular_topology, without_cells
from tools.bench._common import Spread, median_of, print_result
from tools.bench.recovery import MODEL, figures, job_of_losses, read_losses

LAYERS, MICRO_BATCH, GLOBAL_BATCH = 4, 2, 32
"""Those of ``recovery.MODEL``."""
EVERY_SECONDS = 600.0
DENSE = shlex.split("--ffn-hidden-size 512 --disable-bias-linear")
EXPERTS = shlex.split("""
    --ffn-hidden-size 512 --moe-ffn-hidden-size 256 --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.01
    --disable-bias-linear
""")


@dataclass(frozen=True)
class Return:
    """The return of one rank, in seconds."""

    absent: float
    returning: float


def read_returns(events: list[EventRecord], normal: float) -> list[Return]:
    """Return the figures of each admission in a job's events."""
    commits = {record.fields["step"]: record.wall for record in events if record.kind == "step"}
    joins = {r.generation: r.fields["joined"] for r in events if r.kind == "generation" and r.fields["joined"]}
    losses = sorted({(r.wall, r.generation) for r in events if r.kind == "loss"})
    found = []
    for generation in sorted(joins):
        first = min(r.fields["step"] for r in events if r.kind == "step" and r.generation == generation)
        lost = max(wall for wall, _ in losses if wall < commits[first])
        found.append(Return(commits[first] - lost, commits[first] - commits[first - 1] - normal))
    return found


def measured(ranks: int, losses: int, flags: list[str]) -> dict[str, object]:
    """Return the figures of one job with ``losses``, beside those of ``tools.bench.recovery``."""
    victims = [(3 * number) % ranks for number in range(losses)]  # ranks of both stages, rank 0 among them
    events, output = job_of_losses("elastic", ranks, "mid_backward", "kill", victims, (*MODEL, *flags))
    found = read_losses(events, output, ranks)
    returns = read_returns(events, found[0].normal_step)
    for loss, back in zip(found, returns, strict=True):
        print(f"{loss}; {back}", file=sys.stderr, flush=True)
    return {
        **figures(found),
        "recover_s": median_of([loss.overhead + loss.normal_step for loss in found]),
        "absent_s": median_of([back.absent for back in returns]),
        "returning_s": median_of([back.returning for back in returns]),
    }


def step_ns(topology: Topology, profile: Profile) -> int:
    """Return the time of a step of the plan for ``topology``, of which a ghost is taken for a micro-batch."""
    plan: Plan = crewed(choice_of(policy_named("elaswave"), False))(topology, profile)
    whole = tuple(range(topology.grid.micro_batch_size))
    charged = [piece if piece.rows else replace(piece, rows=whole) for piece in plan.pieces]
    return walk(plan.tables, plan_costs(charged, plan.edges, plan.cells, profile)).makespan


def kept(replicas: int, size: int) -> dict[str, float]:
    """Return rates after the loss of one cell, of crews of ``size`` replicas: ours, and with its crew dropped."""
    profile = uniform_profile(LAYERS + 2)
    waves = GLOBAL_BATCH // MICRO_BATCH // replicas
    topology = replace(regular_topology(replicas, 2, LAYERS + 2, MICRO_BATCH, waves), crew_size=size)
    before, after = step_ns(topology, profile), step_ns(without_cells(topology, {0}), profile)
    return {"kept": before / after, "crew_dropped": 1 - size / replicas}


def main() -> None:
    """Parse, run the jobs in turn, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--losses", type=int, default=4, help="Losses a job.")
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    replicas = options.ranks // 2
    shared = [*EXPERTS, "--expert-model-parallel-size", str(replicas)]
    dense = measured(options.ranks, options.losses, DENSE)
    experts = measured(options.ranks, options.losses, shared)
    rates = {f"crews of {size}": kept(replicas, size) for size in dict.fromkeys((replicas, 2))}
    print_result(
        "experts",
        {
            "ranks": options.ranks,
            "layout": f"pp2 dp{replicas} ep{replicas}",
            "flags": " ".join((*MODEL, *shared)),
            "dense": dense,
            "experts": experts,
            "recovering_ratio": ratio(experts, dense, "recovering_s"),
            "overhead_ratio": ratio(experts, dense, "overhead_s"),
            "recover_ratio": ratio(experts, dense, "recover_s"),
            "rates": rates,
            "every_s": EVERY_SECONDS,
            "ettr": ettr(experts, rates[f"crews of {replicas}"]["kept"]),
        },
    )


def ratio(one: dict[str, object], other: dict[str, object], name: str) -> float:
    """Return the ratio of two medians."""
    return middle(one, name) / middle(other, name)


def middle(found: dict[str, object], name: str) -> float:
    """Return the median of a figure."""
    value = found[name]
    assert isinstance(value, Spread)
    return value.median


def ettr(found: dict[str, object], rate: float) -> float:
    """Return the share of the time that trains at one loss every :data:`EVERY_SECONDS`."""
    costs = max(0.0, middle(found, "overhead_s")) + max(0.0, middle(found, "returning_s"))
    return 1 - (costs + (1 - rate) * middle(found, "absent_s")) / EVERY_SECONDS


if __name__ == "__main__":
    main()
