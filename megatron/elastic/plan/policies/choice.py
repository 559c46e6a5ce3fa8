"""Which plan a generation runs: the configured policy's answer to who is here.

Idea: one signature, ``choice(topology, profile) → Plan``, for every policy. What
stood before the change is in the topology (segments of dead cells are still
listed), so the plan is a function of the decision alone and every process, also
one that just joined, finds the same. These are the answers that hold at once,
while units stay where they are; :mod:`policy` compares the same policies with
everything they may do later.

A policy may leave rows out (``Plan.skipped``): a batch that shrank is another
batch. Its samples are consumed, not computed, and loss weights and ledger know.

Sources: ElasWave (arXiv 2510.00606), ReCycle (arXiv 2405.14009), TorchFT
(github.com/pytorch/torchft), MindSpeed's elastic training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType

from megatron.elastic.plan.dataflow import PlanError, Share, home_rows
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.planner import assemble, instant_plan
from megatron.elastic.plan.policies.policy import MindSpeed, TorchFT, damaged_replicas

__all__ = ["CHOICES", "Choice", "choice_named"]

Choice = Callable[[Topology, Profile], Plan]
"""Raises :class:`PlanError` when the policy cannot go on with who is here."""

_KEPT = 4
"""Answers that a choice keeps: of who is here, who was, and who will be."""
_Answer = Callable[[Topology, Profile, bool], Plan]
"""A choice that is also told whether tables split the backward."""


def _elaswave(topology: Topology, profile: Profile, split: bool, cut: bool = False) -> Plan:
    return instant_plan(topology, profile, split_backward=split, cut_microbatches=cut)


def _recycle(topology: Topology, profile: Profile, split: bool) -> Plan:
    """Whole micro-batches to peers of the stage; after a loss, weight gradients fill the bubbles."""
    decoupled = split or bool(damaged_replicas(topology))
    return replace(instant_plan(topology, profile, "reroute", split_backward=decoupled), labels=("recycle",))


def _torchft(topology: Topology, profile: Profile, split: bool) -> Plan:
    """The replica is the unit of loss, and its part of the batch goes with it."""
    damaged = frozenset(damaged_replicas(topology))
    if not damaged:
        return instant_plan(topology, profile, split_backward=split)
    if len(damaged) == len(topology.replicas):
        raise PlanError("policy torchft: every replica has lost a rank; it restarts from the last checkpoint")
    homes = home_rows(topology)
    shares = [
        Share(segment.cell, segment.first, segment.end, rows, wave)
        for number, replica in enumerate(topology.replicas)
        if number not in damaged
        for wave, rows in enumerate(homes[number])
        for segment in replica.segments
    ]
    skipped = sorted(row for number in damaged for rows in homes[number] for row in rows)
    plan = assemble(topology, profile, shares, split, ("torchft",))
    return replace(plan, skipped=tuple(skipped))


def _torchft_batch(topology: Topology, profile: Profile, split: bool) -> Plan:
    """The replica is the unit of loss, the others take its micro-batches."""
    if not damaged_replicas(topology):
        return instant_plan(topology, profile, split_backward=split)
    outcome = TorchFT(keep_batch=True).respond(topology, profile)
    if outcome.answer is None:
        raise PlanError("policy torchft-batch: every replica has lost a rank; it restarts from the last checkpoint")
    return replace(outcome.plan(topology, profile, split), labels=("torchft-batch",))


def _mindspeed(topology: Topology, profile: Profile, split: bool) -> Plan:
    """One data-parallel domain may go, once."""
    if not (damaged := damaged_replicas(topology)):
        return instant_plan(topology, profile, split_backward=split)
    outcome = MindSpeed().respond(topology, profile)
    if outcome.restarts or outcome.answer is None:
        raise PlanError(
            f"policy mindspeed: replicas {damaged} have lost ranks, it goes on without one of "
            f"{len(topology.replicas)} at most; it restarts from the last checkpoint"
        )
    return replace(outcome.plan(topology, profile, split), labels=("mindspeed",))


def _spares(topology: Topology, profile: Profile, split: bool) -> Plan:
    """Waiting cells have taken lost places before this is asked; where one is left open, the job restarts."""
    if damaged := damaged_replicas(topology):
        raise PlanError(
            f"policy spares: replicas {damaged} have lost ranks and no spare is ready; "
            "it restarts from the last checkpoint"
        )
    return replace(instant_plan(topology, profile, split_backward=split), labels=("spares",))


CHOICES: Mapping[str, _Answer] = MappingProxyType(
    {
        "elaswave": _elaswave,
        "recycle": _recycle,
        "torchft": _torchft,
        "torchft-batch": _torchft_batch,
        "mindspeed": _mindspeed,
        "spares": _spares,
    }
)


def choice_named(name: str, split_backward: bool = False, cut_microbatches: bool = False) -> Choice:
    """The choice of ``--elastic-policy name``; its tables split every backward if asked to.

    ``cut_microbatches``: rows count by themselves (per-token loss), so elaswave may share to the row.

    Raises :class:`PlanError` for an unknown name.
    """
    if name not in CHOICES:
        raise PlanError(f"unknown policy {name!r}: one of {', '.join(CHOICES)}")
    answer: _Answer = CHOICES[name]
    if name == "elaswave" and cut_microbatches:
        answer = partial(_elaswave, cut=True)

    @lru_cache(maxsize=_KEPT)
    def choice(topology: Topology, profile: Profile) -> Plan:
        return answer(topology, profile, split_backward)

    return choice
