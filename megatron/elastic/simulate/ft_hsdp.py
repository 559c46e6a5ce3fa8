"""FT-HSDP's arithmetic at 100K GPUs, and the other systems on the same failures.

Published (arXiv 2602.00277): 12 replicas of 8,192 GPUs and a failure every 18
minutes. Recovery stalls synchronous training for 10 minutes: 44% of the time trains.
FT-HSDP stalls for 3, and the replica that failed is away for the 7 minutes of its
restart that are left: ``(7 x 11/12 + 8) / 18`` is the published 80%. The stall alone
would leave 83%.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.elastic.simulate.fleet import Fleet
from megatron.elastic.simulate.goodput import Assumptions, Goodput, fleet_policies, run_trace
from megatron.elastic.simulate.rates import FT_HSDP, RATES, Stall
from megatron.elastic.simulate.scenarios import layer_profile
from megatron.elastic.simulate.traces import TraceOptions, failure_trace

__all__ = ["arithmetic", "side_by_side"]


def arithmetic() -> dict[str, float]:
    """Effective training time by the closed form beside the published values."""
    synchronous = Stall(FT_HSDP.interval_s, FT_HSDP.restart_s, FT_HSDP.restart_s, 1)
    replica = Stall(FT_HSDP.interval_s, FT_HSDP.replica_stall_s, FT_HSDP.restart_s, FT_HSDP.replicas)
    return {
        "synchronous": synchronous.effective,
        "synchronous_published": FT_HSDP.published_synchronous,
        "ft_hsdp": replica.effective,
        "ft_hsdp_published": FT_HSDP.published_replica,
        "ft_hsdp_by_stall_alone": replica.running,
    }


def side_by_side(days: float = 7.0, seed: int = 0, assumed: Assumptions | None = None) -> list[Goodput]:
    """All policies on one trace at that rate: 1,536 pipelines of 8 stages x TP 8, the GPUs of FT-HSDP's 12 replicas.

    FT-HSDP loses a whole replica of its own size to a loss, until that is restarted; others lose cells until they
    are repaired.
    """
    assumed = assumed or Assumptions()
    stages, tp = 8, 8
    cells = FT_HSDP.replicas * FT_HSDP.replica_gpus // tp
    fleet = Fleet(cells // stages, stages, 32, layer_profile(32), split_backward=True)
    published = replace(fleet, replicas=FT_HSDP.replicas, stages=cells // FT_HSDP.replicas)
    trace = failure_trace(TraceOptions(cells, tp, days, RATES["ft-hsdp"].per_device_day, seed=seed))
    restarted = [replace(loss, repair_s=FT_HSDP.restart_s) for loss in trace]
    results = []
    for policy in fleet_policies(assumed, spares=cells // 100):
        who, losses = (published, restarted) if policy.name == "ft-hsdp" else (fleet, trace)
        results.append(run_trace(who, losses, days * 86_400, policy, assumed, tp))
    return results
