"""A sound transition passes; each documented class of bug, injected, is caught and named."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from megatron.elastic.comm.messages import decode, encode
from megatron.elastic.state import certificate
from megatron.elastic.state.certificate import (
    FEW,
    CertificateError,
    ParameterClaim,
    Statement,
    certify,
    state_claims,
)
from megatron.elastic.state.claims import Claim, Claims, in_agreement
from megatron.elastic.state.hashing import content_hash
from megatron.elastic.state.layout import ParamSpec, UnitLayout
from megatron.elastic.state.ownership import Copies, Placement, Rules, UnitGroup, initial
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord, Vote, advance

RANKS, ROWS, SEED = (0, 1, 2), 12, 1234
LAYOUT = UnitLayout.build(0, 0, [ParamSpec("w", 1500, (1500,), True), ParamSpec("b", 40, (40,), False, 0.0)], 1024)
GROUP = UnitGroup(0, 0, LAYOUT.blocks, RANKS)
RATES = (Rate(1e-2, 0.1),)
HYPER = Hyper(ConstantSchedule(RATES), scaler="dynamic", initial_loss_scale=1024.0)


class Job:
    """Three data-parallel ranks with owned and mirrored blocks, two real steps in, and what each computes with."""

    def __init__(self) -> None:
        self.placement = initial([GROUP], Rules(1, 2, dict.fromkeys(RANKS, 0)))
        self.pools = {rank: StatePool(rank, {(0, 0): LAYOUT}, HYPER) for rank in RANKS}
        self.record = StepRecord.initial(HYPER)
        flat = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(1))
        for key, copies in self.placement.copies.items():
            block = LAYOUT.blocks[key[2]]
            for rank in copies.ranks:
                self.pools[rank].put(key, flat[block.start : block.stop], 0)
        for step in range(2):
            self.step(step)
        self.params = {rank: self.gathered() for rank in RANKS}
        self.records = dict.fromkeys(RANKS, self.record)
        self.placements = dict.fromkeys(RANKS, self.placement)
        self.rows = {rank: tuple(range(4 * rank, 4 * rank + 4)) for rank in RANKS}
        self.versions = dict.fromkeys(RANKS, 2)
        self.random = dict.fromkeys(RANKS, (SEED, 2))

    def step(self, step: int, skip_rank: int = -1) -> None:
        key = GradientKey(step, 1)
        flat = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(100 + step))
        self.record = advance(self.record, Vote(key, [1.0], False, 1.0, 1.0, ROWS, rates=RATES), HYPER)
        for rank, pool in self.pools.items():
            for block in pool:
                span = LAYOUT.blocks[block[2]]
                pool.retain(block, key, flat[span.start : span.stop])
            if rank != skip_rank:
                pool.apply(self.record)

    def gathered(self) -> torch.Tensor:
        flat = torch.empty(LAYOUT.numel)
        for block in LAYOUT.blocks:
            flat[block.start : block.stop] = self.pools[self.placement.owner(block.key)].get(block.key).master
        return flat.bfloat16()

    def statements(self) -> dict[int, Statement]:
        out = {}
        for rank, pool in self.pools.items():
            claims = state_claims(pool, self.placements[rank], set(pool), torch.bfloat16)
            hashes = {b.key: content_hash(b.key, self.params[rank][b.start : b.stop]) for b in LAYOUT.blocks}
            statement = Statement(
                rank,
                3,
                self.placements[rank].digest(),
                "plan",
                self.records[rank].to_json(),
                claims,
                ParameterClaim(self.versions[rank], ((0, 0),), hashes),
                self.rows[rank],
                self.random[rank],
            )
            out[rank] = decode(Statement, encode(statement), rank)
        return out

    def certify(self):
        return certify(self.statements(), [GROUP], 1, ROWS, RANKS)

    def findings(self) -> tuple[str, ...]:
        with pytest.raises(CertificateError) as found:
            self.certify()
        return found.value.findings


@pytest.fixture
def job() -> Job:
    return Job()


def test_a_block_that_is_not_the_one_that_was_saved_is_found(job):
    saved = {key: claim.content for s in job.statements().values() for key, claim in s.copies.single.items()}
    assert all(saved.values()) and certify(job.statements(), [GROUP], 1, ROWS, RANKS, saved=saved).blocks == len(saved)
    wrong = sorted(saved)[1]
    with pytest.raises(CertificateError) as found:
        certify(job.statements(), [GROUP], 1, ROWS, RANKS, saved={**saved, wrong: "0" * 32})
    owner = job.placement.owner(wrong)
    assert found.value.findings == (f"block {wrong}, loaded by rank {owner}, is not the state that was saved",)


def some_mirror(job: Job) -> tuple:
    """(block, its mirror's rank)."""
    key, copies = next(iter(job.placement.copies.items()))
    return key, copies.mirrors[0]


def test_a_sound_state_passes_and_says_what_was_compared(job):
    certificate = job.certify()
    blocks = len(LAYOUT.blocks)
    assert (certificate.version, certificate.generation, certificate.ranks) == (2, 3, RANKS)
    assert (certificate.blocks, certificate.copies, certificate.contents_compared) == (blocks, 2 * blocks, 2 * blocks)
    assert certificate.digest == job.certify().digest


def test_stale_moments(job):
    key, rank = some_mirror(job)
    job.pools[rank].get(key).exp_avg.mul_(0.5)
    assert job.findings() == (f"block {key} at rank {rank} (mirror) differs in contents from the owner's (rank 0)",)


def test_a_mirror_one_step_behind(job):
    job.step(2, skip_rank=1)
    job.records = dict.fromkeys(RANKS, job.record)
    assert any("rank 1 (mirror) is at version 2, the record at 3" in f for f in job.findings())


def test_a_mirror_replayed_from_another_gradient_is_seen_without_hashing_contents(job):
    key, rank = some_mirror(job)
    before = job.statements()
    claims = before[rank].copies.single
    other = claims[key]._replace(lineage="0" * 32, content="")
    before[rank] = replace(before[rank], copies=Claims.of({**claims, key: other}))
    with pytest.raises(CertificateError, match="made from other state or gradients"):
        certify(before, [GROUP], 1, ROWS, RANKS)


@pytest.mark.parametrize("many", [False, True])
def test_only_many_copies_are_compared_in_columns_and_a_fault_among_them_is_named(job, many, monkeypatch):
    used = []
    monkeypatch.setattr(certificate, "in_agreement", lambda *given: used.append(in_agreement(*given)) or used[-1])
    layout = UnitLayout.build(1, 0, [ParamSpec("w", FEW << 9, (FEW << 9,), True)], 1 << 10)
    groups, statements = [GROUP, *[UnitGroup(1, 0, layout.blocks, RANKS)] * many], job.statements()
    for rank, role in (0, "owner"), (1, "mirror"), (2, ""):
        further = {block.key: Claim(role, 2, str(block)) for block in layout.blocks} if many and role else {}
        copies = Claims.of({**statements[rank].copies.single, **further})
        parameters = statements[rank].parameters._replace(spaces=((0, 0), (1, 0)))
        statements[rank] = replace(statements[rank], copies=copies, parameters=parameters)
    certify(statements, groups, 1, ROWS, RANKS)
    assert used == [True] * many
    claims = dict(statements[1].copies.single)
    claims[max(claims)] = claims[max(claims)]._replace(version=1)
    statements[1] = replace(statements[1], copies=Claims.of(claims))
    with pytest.raises(CertificateError) as found:
        certify(statements, groups, 1, ROWS, RANKS)
    where = f"block {max(claims)} at rank 1 ({claims[max(claims)].role})"
    assert len(found.value.findings) == 1 and found.value.findings[0].startswith(where)
    assert used == [True, False] * many


def test_swapped_blocks(job):
    pool = job.pools[0]
    same_size = next(pair for pair in combinations(pool, 2) if len({pool.block(key).numel for key in pair}) == 1)
    a, b = (pool.get(key) for key in same_size)
    a.store, b.store = b.store, a.store
    findings = job.findings()
    assert all(any(f"block {key}" in finding for finding in findings) for key in same_size)


def test_two_owners_and_none(job):
    key, rank = some_mirror(job)
    owner = job.placement.owner(key)
    swapped = Placement({**job.placement.copies, key: Copies(rank, (owner,))})
    job.placements[rank] = swapped
    assert f"block {key} has owners {sorted((owner, rank))}" in job.findings()
    job.placements = {**dict.fromkeys(RANKS, job.placement), owner: swapped}
    findings = job.findings()
    assert f"block {key} has no owner" in findings and any("placement" in f for f in findings)


def test_a_missing_mirror_and_one_too_many(job):
    key, rank = some_mirror(job)
    copy = job.pools[rank].get(key)
    job.pools[rank].drop(key)
    assert job.findings() == (f"block {key} has 0 mirrors on ranks [0], 1 are due",)
    everywhere = Placement({**job.placement.copies, key: Copies(0, (1, 2))})
    job.placements = dict.fromkeys(RANKS, everywhere)
    for other in RANKS:
        if key not in job.pools[other]:
            job.pools[other].put(key, copy.master, 2, copy.exp_avg, copy.exp_avg_sq).lineage = copy.lineage
    assert job.findings() == (f"block {key} has 2 mirrors on ranks [0, 1, 2], 1 are due",)


def test_a_missing_and_a_doubled_sample(job):
    job.rows[1] = (4, 5, 7, 8)
    assert job.findings() == (
        "rows 6 of the global batch are assigned to no rank",
        "row 8 of the global batch is assigned to ranks [1, 2]",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rates", (Rate(1e-3, 0.1),)),
        ("adam_step", 1),
        ("loss_scale", 512.0),
        ("growth_tracker", 0),
        ("scheduler_steps", 12),
        ("consumed_samples", 36),
        ("bias_correction2", 0.5),
    ],
)
def test_stale_learning_rate_step_counter_or_loss_scale(job, name, value):
    job.records[2] = replace(job.record, **{name: value})
    [finding] = job.findings()
    assert finding.startswith(f"rank 2: record field {name} is ")


def test_parameters_unlike_their_masters(job):
    job.params[1][700] += 1
    block = next(b for b in LAYOUT.blocks if b.start <= 700 < b.stop)
    assert job.findings() == (f"rank 1: parameters of block {block.key} are not their masters",)


def test_an_all_gather_skipped_after_loading(job):
    """Rank 2 loaded its own blocks but still computes with what it was initialised with."""
    job.params[2] = torch.randn(LAYOUT.numel).bfloat16()
    assert len(job.findings()) == len(LAYOUT.blocks)
    job.params[2] = job.gathered()
    job.versions[2] = 1
    assert job.findings() == ("rank 2 computes with parameters of version 1, not 2",)


def test_a_unit_without_parameters_on_a_rank_that_computes_it(job):
    statements = job.statements()
    statements[1] = replace(statements[1], parameters=ParameterClaim(2, (), {}))
    with pytest.raises(CertificateError) as found:
        certify(statements, [GROUP], 1, ROWS, RANKS)
    assert found.value.findings == ("rank 1 has no parameters of unit 0, shard 0, which it computes",)


def test_random_numbers_used_again(job):
    job.random[1] = (SEED, 1)
    assert job.findings() == ("rank 1 would use the masks of step 1 again, the state is at 2",)
    job.random[1] = (SEED + 1, 2)
    assert job.findings() == (f"rank 1: random seed is {SEED + 1}, on other ranks {SEED}",)


def test_an_older_generation_or_another_plan(job):
    statements = job.statements()
    statements[1] = replace(statements[1], generation=2, plan="other")
    with pytest.raises(CertificateError) as found:
        certify(statements, [GROUP], 1, ROWS, RANKS)
    assert found.value.findings == (
        "rank 1: generation is 2, on other ranks 3",
        "rank 1: plan is 'other', on other ranks 'plan'",
    )


def test_a_copy_that_waits_to_be_retired_is_not_claimed(job):
    spare = next(k for k in job.placement.copies if k not in job.pools[0])
    job.pools[0].put(spare, torch.zeros(job.pools[0].block(spare).numel), 2)
    job.certify()


def test_a_silent_member_and_a_zombie(job):
    statements = job.statements()
    with pytest.raises(CertificateError, match="no statement of rank 7"):
        certify(statements, [GROUP], 1, ROWS, (*RANKS, 7))
    without = {rank: statement for rank, statement in statements.items() if rank != 1}
    with pytest.raises(CertificateError, match="no statement of rank 1"):
        certify(without, [GROUP], 1, ROWS, RANKS)
    statements[9] = replace(statements[0], rank=9, copies=Claims(), rows=())
    with pytest.raises(CertificateError, match="rank 9, which is not a member"):
        certify(statements, [GROUP], 1, ROWS, RANKS)


def test_an_owner_that_does_not_compute_the_unit(job):
    group = UnitGroup(0, 0, LAYOUT.blocks, (0, 1))
    with pytest.raises(CertificateError, match="owned by rank 2, which does not compute its unit"):
        certify(job.statements(), [group], 1, ROWS, RANKS)
    certify(job.statements(), [group], 1, ROWS, RANKS, parked_owners=True)


def test_claims_leave_out_copies_that_are_still_being_added(job):
    spare = next(k for k in job.placement.copies if k not in job.pools[0])
    job.pools[0].put(spare, torch.zeros(job.pools[0].block(spare).numel), 2, counted=False)
    assert spare not in state_claims(job.pools[0], job.placement).single
    job.certify()
