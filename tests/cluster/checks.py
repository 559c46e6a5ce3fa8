"""The claims that hold after every run of a cluster, whatever was lost in it.

begun     when a rank first commits a step, the journal says that all have begun: a loss no longer starts all anew
told      a step's result and record are the same on every rank that finishes, and come once. (A rank that is lost
          may alone have known of a vote that the others then took again, over the same gradients.)
computed  losses, norms and evaluations of every life are those of the undisturbed run, to 1e-5; in exact mode but
          for the order in which the reports of ranks are added up
held      parameters are what the masters of their owners say; the copies that the placement names are there, at
          the last version, with the same bits
settled   every block has as many mirrors as it should
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch

from megatron.elastic.control.generations import Generations
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.settings import StepResult
from tests.cluster.cluster import Cluster, Program, RankProcess, config_of, named, run
from tests.scenario.scenario import Scenario

__all__ = ["check", "undisturbed"]

TOLERANCE = 1e-5


@cache
def _reference(scenario: Scenario, cut: bool, parts: bool, experts: tuple[int, int] | None, grid: bool) -> RankProcess:
    return run(scenario, Program(cut=cut, parts=parts, experts=experts, grid=grid)).finished[0]


def undisturbed(
    scenario: Scenario,
    cut: bool = False,
    parts: bool = False,
    experts: tuple[int, int] | None = None,
    grid: bool = False,
) -> RankProcess:
    """A rank of the same job without any fault. The other arguments are fields of :class:`Program`."""
    exact = (("exact", True),) if config_of(scenario).exact else ()
    plain = replace(scenario, seed=0, back="soon", heavy=False, settings=exact, faults=(), wishes=())
    return _reference(plain, cut, parts, experts, grid)


def check(cluster: Cluster, settled: bool = False) -> None:
    """Raises ``AssertionError`` for what does not hold. ``settled``: copies are to be in place again at the end."""
    with named(cluster.scenario):
        _check(cluster, settled)


def last_step(cluster: Cluster) -> int:
    """The step with which the job ended: the scenario's last one, unless a user asked for an earlier end."""
    if cluster.scenario.ends_early:
        return max(max(process.results) for process in cluster.finished)
    return cluster.scenario.steps


def _check(cluster: Cluster, settled: bool) -> None:
    scenario = cluster.scenario
    errors = {process.process.name: process.error for process in cluster.processes if process.error is not None}
    assert not errors, errors
    assert cluster.finished, "no rank came to the end"
    _check_begun(cluster)
    _check_told(cluster)
    tolerance = 0.0 if config_of(scenario).exact else TOLERANCE
    program, shortened = cluster.program, replace(scenario, steps=last_step(cluster))
    reference = undisturbed(shortened, program.cut, program.parts, program.experts, program.grid)
    for process in cluster.processes:
        _check_computed(process, reference, tolerance)
    _check_held(cluster, settled)


def _check_begun(cluster: Cluster) -> None:
    known = min((passed.entries for passed in cluster.passed if passed.point == "after_vote"), default=0)
    state = Generations(dict(cluster.agents[0].state.nodes), nominal=cluster.scenario.layout.ranks)
    for entry in cluster.journal.entries[:known]:
        state.apply(entry)
    assert not state.preparing, "a committed step would be forgotten with the next loss"


def _check_told(cluster: Cluster) -> None:
    wanted = set(range(1, last_step(cluster) + 1))
    for process in cluster.finished:
        steps = sorted(process.results)
        assert steps == list(range(steps[0], max(wanted) + 1)), f"{process.process.name} went through {steps}"
    for step in sorted(wanted):
        lives = [process for process in cluster.finished if step in process.results]
        told = {process.process.name: (process.results[step], process.records[step]) for process in lives}
        # Of the first steps nobody that finishes need have been told.
        assert len(set(map(repr, told.values()))) <= 1, f"step {step} is not the same everywhere: {told}"
        assert any(step in process.results for process in cluster.processes), f"step {step} was seen by no rank"
    norms = {process.norm for process in cluster.finished}
    assert len(norms) == 1, f"parameter norms differ: {norms}"


def _check_computed(process: RankProcess, reference: RankProcess, tolerance: float) -> None:
    for step, result in process.results.items():
        assert _alike(result, reference.results[step], tolerance), (step, result, reference.results[step])
    for step, sums in process.evaluations.items():
        for name, (total, count) in sums.items():
            wanted, of = reference.evaluations[step][name]
            assert count == of and math.isclose(total, wanted, rel_tol=max(tolerance, 1e-6)), (step, sums)
    assert reference.norm is not None
    if process.norm is None:
        return
    assert math.isclose(process.norm, reference.norm, rel_tol=max(tolerance, 1e-7)), (process.norm, reference.norm)


def _alike(result: StepResult, wanted: StepResult, tolerance: float) -> bool:
    """Sums of what was reported are taken over ranks in any order, also in exact mode: there the last bits differ."""
    losses = all(
        math.isclose(result.losses[name], value, rel_tol=max(tolerance, 1e-6)) for name, value in wanted.losses.items()
    )
    norms = math.isclose(result.grad_norm, wanted.grad_norm, rel_tol=max(tolerance, 1e-9))
    return losses and norms and (result.skipped, result.zeros) == (wanted.skipped, wanted.zeros)


def _check_held(cluster: Cluster, settled: bool) -> None:
    engines = {process.rank: _engine(process) for process in cluster.finished}
    steps = last_step(cluster)
    placements = {engine.view.configuration.digest for engine in engines.values()}
    assert len(placements) == 1, "ranks end with different placements"
    for key, copies in next(iter(engines.values())).view.placement.copies.items():
        assert len(set(copies.ranks)) == len(copies.ranks), f"block {key} has two copies on one rank: {copies}"
        here = {rank: engines[rank].tools.pool.get(key) for rank in copies.ranks if rank in engines}
        owner = here.get(copies.owner)
        for rank, copy in here.items():
            assert copy.version == steps and copy.counted, f"block {key} on rank {rank} is at {copy.version}"
            assert owner is None or torch.equal(copy.state, owner.state), f"block {key} differs on rank {rank}"
        if owner is not None:
            _check_parameters(engines, key, owner.master)
    for rank, engine in engines.items():
        short = engine.views.short_of_mirrors(engine.view)
        assert not (settled and short), f"rank {rank}: blocks {short} lack mirrors at the end"


def _check_parameters(engines: dict[int, Engine], key: tuple[int, int, int], master: torch.Tensor) -> None:
    for rank, engine in engines.items():
        place = engine.tools.arena.slices.get(key[:2])
        if place is not None:
            held = engine.tools.arena.block_parameters(place.layout.blocks[key[2]]).detach()
            assert torch.equal(held, master), f"rank {rank}: parameters of block {key} are not its master's"


def _engine(process: RankProcess) -> Engine:
    assert process.engine is not None
    return process.engine
