"""All policies by name: the one place that the flag, the engine, the simulator and the documentation read.

To add a policy, write its class in a file of its own and name it in :data:`POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType

from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.policies.base import Policy, TableOptions
from megatron.elastic.plan.policies.elaswave import ElasWave
from megatron.elastic.plan.policies.mindspeed import MindSpeed
from megatron.elastic.plan.policies.ntp import NonuniformTP
from megatron.elastic.plan.policies.recycle import ReCycle
from megatron.elastic.plan.policies.restart import CheckpointRestart
from megatron.elastic.plan.policies.spares import Spares
from megatron.elastic.plan.policies.torchft import TorchFT, TorchFTBatch

__all__ = ["POLICIES", "Choice", "choice_of", "engine_policies", "policy_help", "policy_named", "policy_table"]

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "elaswave": ElasWave,
        "recycle": ReCycle,
        "torchft": TorchFT,
        "torchft-batch": TorchFTBatch,
        "mindspeed": MindSpeed,
        "ntp": NonuniformTP,
        "spares": Spares,
        "restart": CheckpointRestart,
    }
)

Choice = Callable[[Topology, Profile], Plan]
"""The plan for the living cells. Raises :class:`PlanError` when the policy cannot go on with them."""

_KEPT = 8
"""Answers that a choice keeps: for the present cells, those before, and those to come, and two sizes of a batch."""


def policy_named(name: str) -> Policy:
    """The policy of that name. Raises :class:`PlanError` for an unknown one."""
    if name not in POLICIES:
        raise PlanError(f"unknown policy {name!r}: one of {', '.join(POLICIES)}")
    return POLICIES[name]()


def engine_policies() -> tuple[str, ...]:
    """The names that ``--elastic-policy`` offers."""
    return tuple(name for name, make in POLICIES.items() if make().in_engine)


def choice_of(policy: Policy, split_backward: bool = False, cut_microbatches: bool = False) -> Choice:
    """Return the instant plan of the engine under ``policy``. ``cut_microbatches``: see :class:`TableOptions`."""
    options = TableOptions(split_backward, cut_microbatches)

    @lru_cache(maxsize=_KEPT)
    def choice(topology: Topology, profile: Profile) -> Plan:
        return policy.instant(topology, profile, options)

    return choice


def policy_help() -> str:
    """One clause a policy, for the flag's help."""
    return "; ".join(f"'{name}': {policy_named(name).summary}" for name in engine_policies())


def policy_table() -> str:
    """The policies as a Markdown table, for the documentation."""
    lines = ["| policy | the samples of a lost rank | layers move later | in |", "|---|---|---|---|"]
    for name in POLICIES:
        policy = policy_named(name)
        where = "engine, simulator" if policy.in_engine else "simulator"
        lines.append(f"| `{name}` | {policy.summary} | {'yes' if policy.moves_units else 'no'} | {where} |")
    return "\n".join(lines) + "\n"
