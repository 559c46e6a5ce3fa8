"""Processor time that each rank of a large job needs at a loss, and in each vote.

    python -m tools.bench.agreement [--repeat 3]

State of real models is laid out from their shapes. One rank is lost. What every survivor then computes is timed,
without what it sends and waits for. For each job:

reports      read all reports from the decision, resolve the step, count the copies
promotion    make mirrors owners, hash the new placement, list the blocks and messages of this rank
plan         the plan of the living ranks, its digest, and the order in which units are added up
certificate  read the statements of all ranks and compare them
balance      the balanced placement, which a movement begins to reach at a later boundary
vote         pack a tally and unpack the sums, once a step

CPU seconds of the best repetition. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import msgspec

from megatron.elastic.comm.address import Address
from megatron.elastic.comm.messages import decode, encode
from megatron.elastic.control.membership import Decision, each_once
from megatron.elastic.engine.compute.vote import Tally, VoteLayout
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.cell_sizes import CellSizes
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.report import Report, reports_of
from megatron.elastic.engine.generation.shape import CellCut
from megatron.elastic.engine.generation.view import block_index, routes, unit_groups
from megatron.elastic.plan.model import Grid
from megatron.elastic.plan.planner import uniform_profile
from megatron.elastic.plan.policies.registry import choice_of, policy_named
from megatron.elastic.plan.profile import PPM
from megatron.elastic.plan.schedule.finishing import finishing_order
from megatron.elastic.platform.garbage import garbage_later
from megatron.elastic.state.certificate import ParameterClaim, Statement, certify
from megatron.elastic.state.claims import Claim, Claims
from megatron.elastic.state.hashing import text_hash
from megatron.elastic.state.layout import BlockKey, ParamSpec, UnitLayout, UnitShard
from megatron.elastic.state.ownership import initial, rebalance
from megatron.elastic.state.placement import Placement, Rules, UnitGroup, promote_only
from megatron.elastic.state.protocol import Holdings, all_copies, resolve
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord
from tools.bench._common import print_result
from tools.bench.planner import best

RANKS_OF_A_NODE = 8
LOST = 5


@dataclass(frozen=True)
class Model:
    """Shapes of a model. ``key_values``: width of keys, and of values; ``batch``: sequences of a step.

    Batches: Narayanan et al., arXiv 2104.04473, Table 1, and for Llama 3 16M tokens in sequences of 8,192 (arXiv
    2407.21783, section 3.4).
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    key_values: int
    vocabulary: int
    gated: bool
    batch: int

    def units(self) -> Iterator[tuple[ParamSpec, ...]]:
        """Yield the parameters of each unit, uncut: embedding, layers, final norm and head."""
        h, ffn = self.hidden, self.ffn
        yield (_weight("embedding", self.vocabulary, h),)
        for _ in range(self.layers):
            attention = _weight("qkv", h + 2 * self.key_values, h), _weight("proj", h, h)
            mlp = _weight("fc1", (1 + self.gated) * ffn, h), _weight("fc2", ffn, h)
            yield (*attention, *mlp, _norm("norm1", h), _norm("norm2", h))
        yield _weight("head", self.vocabulary, h), _norm("norm", h)


def _weight(name: str, rows: int, columns: int) -> ParamSpec:
    return ParamSpec(name, rows * columns, (rows, columns), sharded=True)


def _norm(name: str, width: int) -> ParamSpec:
    return ParamSpec(name, width, (width,), sharded=False)


LLAMA_8B = Model("Llama-3 8B", 32, 4096, 14336, 1024, 128256, gated=True, batch=2048)
LLAMA_70B = Model("Llama-3 70B", 80, 8192, 28672, 1024, 128256, gated=True, batch=2048)
LLAMA_405B = Model("Llama-3 405B", 126, 16384, 53248, 1024, 128256, gated=True, batch=2048)
GPT_175B = Model("GPT-3 175B", 96, 12288, 49152, 12288, 51200, gated=False, batch=1536)


@dataclass(frozen=True)
class Job:
    """A job before and after the loss of one rank. Placements have one mirror, nodes have 8 ranks."""

    model: Model
    tensor: int
    pipeline: int
    data: int

    @cached_property
    def topology(self) -> LaunchTopology:
        """Units in equal parts if they can be, as in Llama-3 405B (arXiv 2407.21783, section 3.3.2); else layers."""
        layers, ends = self.model.layers // self.pipeline, [0]
        for stage in range(self.pipeline):
            ends.append(ends[-1] + layers + (stage == 0) + (stage == self.pipeline - 1))
        units = self.model.layers + 2
        if units % self.pipeline == 0:
            ends = [*range(0, units + 1, units // self.pipeline)]
        grid = Grid(self.model.batch, 1, self.data)
        return LaunchTopology(self.tensor, self.pipeline, self.data, tuple(pairwise(ends)), grid)

    @cached_property
    def layouts(self) -> dict[UnitShard, UnitLayout]:
        """The layout of every space, cut at the default size of a block."""
        found = {}
        for unit, parameters in enumerate(self.model.units()):
            for shard in self.topology.shards:
                mine = [
                    self._cut(spec) for spec in parameters if self.topology.shard_of(shard % self.tensor, spec) == shard
                ]
                if mine:
                    found[unit, shard] = UnitLayout.build(unit, shard, mine)
        return found

    def _cut(self, spec: ParamSpec) -> ParamSpec:
        if not spec.sharded:
            return spec
        rows, columns = spec.shape
        return replace(spec, numel=spec.numel // self.tensor, shape=(rows // self.tensor, columns))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the launch."""
        return tuple(range(self.topology.slots))

    @cached_property
    def survivors(self) -> tuple[int, ...]:
        """All ranks but the lost one."""
        return tuple(rank for rank in self.ranks if rank != LOST)

    def groups(self, living: tuple[int, ...]) -> tuple[UnitGroup, ...]:
        """Return the living holders of every space."""
        return unit_groups(Assignment.at_launch(self.topology).undamaged().seated(living), self.layouts, living)

    @staticmethod
    def rules(living: tuple[int, ...]) -> Rules:
        """Return the default rules for placing copies."""
        return Rules(1, 4, {rank: rank // RANKS_OF_A_NODE for rank in living})

    @cached_property
    def placement(self) -> Placement:
        """The placement before the loss."""
        return initial(self.groups(self.ranks), self.rules(self.ranks))


def planned(job: Job) -> None:
    """Plan for the survivors. A cell of fewer ranks than at launch is slower in proportion."""
    sizes = CellSizes.of(lambda tensor, parts: PPM // tensor, CellCut(job.tensor))
    formed = sizes.living_on(Assignment.at_launch(job.topology), job.survivors)
    topology = sizes.topology(formed, job.survivors)
    plan = choice_of(policy_named("elaswave"))(topology, uniform_profile(topology.units))
    assert len(plan.cells) == len(job.ranks) // job.tensor - (job.tensor == 1)
    assert plan.digest
    finishing_order(plan, range(topology.units), topology.units)


HYPER = Hyper(ConstantSchedule((Rate(1e-4, 0.1),)))


def report() -> str:
    """Return the report of a rank that was computing a step."""
    holdings = Holdings(0, 0, (GradientKey(0, 1),), (StepRecord.initial(HYPER),))
    return Report(holdings, phase=1, done=False, parameters=0, held_for=text_hash("")).to_text()


def decided(job: Job) -> bytes:
    """Return the decision as it arrives, with a report of every survivor that was computing a step."""
    members = {
        rank: Address(rank, 1, f"node{rank // RANKS_OF_A_NODE}", {"ip": "10.0.0.1", "port": 1, "broken": []})
        for rank in job.survivors
    }
    texts, text_of = each_once(dict.fromkeys(job.survivors, report()))
    return msgspec.json.encode(Decision(2, members, "loss", texts=texts, text_of=text_of))


def resolved(job: Job, text: bytes) -> Placement:
    """Read the decision, resolve the step, and return the placement with all copies that count."""
    reports = reports_of(msgspec.json.decode(text, type=Decision))
    held = {rank: report.holdings for rank, report in reports.items()}
    counted = all_copies({key: copies.ranks for key, copies in job.placement.copies.items()}, held)
    resolution = resolve(held, counted, lambda record: job.topology.grid.global_batch_size, None)
    assert resolution.kind == "rerun", resolution
    return job.placement.with_copies(counted)


def promoted(job: Job, placement: Placement) -> Placement:
    """Make mirrors owners, and list what rank 0 owns, mirrors, sends and receives."""
    found = promote_only(placement, job.survivors, job.groups(job.survivors))
    assert not found.lost
    found.placement.digest()
    found.placement.owned_by(0), found.placement.mirrored_by(0)
    routes(0, found.placement, found.placement, job.layouts)
    return found.placement


def statements(job: Job, placement: Placement) -> dict[int, bytes]:
    """Return what all survivors state, as it arrives."""
    record, digest = StepRecord.initial(HYPER), placement.digest()
    blocks: dict[int, dict[BlockKey, Claim]] = {rank: {} for rank in job.survivors}
    for key, copies in placement.copies.items():
        for rank in copies.ranks:
            blocks[rank][key] = Claim("owner" if rank == copies.owner else "mirror", 0, text_hash(str(key)))
    spaces: dict[int, list[UnitShard]] = {rank: [] for rank in job.survivors}
    for group in job.groups(job.survivors):
        for rank in group.holders:
            spaces[rank].append((group.unit, group.shard))
    rows = {rank: (rank,) if rank < job.topology.grid.global_batch_size else () for rank in job.survivors}
    rows[0] = (0, *range(len(job.ranks), job.topology.grid.global_batch_size), LOST)
    return {
        rank: encode(
            Statement(
                rank,
                2,
                digest,
                text_hash("plan"),
                record.to_json(),
                Claims.of(blocks[rank]),
                ParameterClaim(0, tuple(spaces[rank]), {}),
                rows[rank],
                (1, 0),
            )
        )
        for rank in job.survivors
    }


def certified(job: Job, placement: Placement, texts: dict[int, bytes]) -> None:
    """Read all statements and compare them."""
    read = {rank: decode(Statement, text, rank) for rank, text in texts.items()}
    due = {key: len(copies.mirrors) for key, copies in placement.copies.items()}
    rows = job.topology.grid.global_batch_size
    certify(read, job.groups(job.survivors), due, rows, job.survivors, parked_owners=True)


@garbage_later()
def measure(job: Job, repeat: int) -> dict[str, float | int | str]:
    """Return the times of one job. As in the engine, Python searches for no garbage meanwhile."""
    decision = decided(job)
    left = resolved(job, decision)
    placement = promoted(job, left)
    said = statements(job, placement)
    layout = VoteLayout(block_index(job.layouts), ("lm loss",))
    tally = Tally(norms=dict.fromkeys(placement.owned_by(0), 1.0))
    sums = layout.pack(tally)
    survivors = job.survivors
    return {
        "model": job.model.name,
        "layout": f"TP {job.tensor} x PP {job.pipeline} x DP {job.data}",
        "ranks": len(job.ranks),
        "blocks": len(job.placement.copies),
        "decision_bytes": len(decision),
        "statements_bytes": sum(map(len, said.values())),
        "reports_s": best(repeat, lambda: resolved(job, decision)),
        "promotion_s": best(repeat, lambda: promoted(job, left)),
        "plan_s": best(repeat, lambda: planned(job)),
        "certificate_s": best(repeat, lambda: certified(job, placement, said)),
        "balance_s": best(repeat, lambda: rebalance(placement, job.groups(survivors), job.rules(survivors))),
        "vote_s": best(repeat, lambda: (layout.pack(tally), layout.unpack(*sums))),
    }


JOBS = (
    Job(LLAMA_8B, 1, 1, 8),
    Job(LLAMA_8B, 1, 1, 64),
    Job(LLAMA_8B, 2, 1, 256),
    Job(LLAMA_70B, 8, 4, 8),
    Job(LLAMA_70B, 8, 4, 32),
    Job(GPT_175B, 8, 16, 8),
    Job(GPT_175B, 8, 16, 32),
    Job(LLAMA_405B, 8, 16, 128),
    Job(replace(LLAMA_405B, batch=8192), 8, 16, 1024),
)


def main() -> None:
    """Measure all jobs and print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for job in JOBS:
        rows.append(measure(job, options.repeat))
        print(
            "  ".join(
                f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}"
                for key, value in rows[-1].items()
            )
        )
    print_result("agreement", {"rows": rows})


if __name__ == "__main__":
    main()
