"""A job's figures as OpenMetrics, for Prometheus and whatever else scrapes it (https://prometheus.io/docs/specs/om/).

Every agent has the same losses, recoveries and lost time: they come from the journal. So a query takes the maximum over
the agents. Steps and loss are those that the workers of the agent's node committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)

from megatron.elastic.control.answers import JobStatus
from megatron.elastic.launch.agent.web import Shown, WebContent

__all__ = ["exposition", "families"]

_PREFIX = "megatron_elastic_"
_STATES = ("starting", "training", "recovering", "draining")
_STANDINGS = ("starting", "waiting", "member", "lost", "done")


def exposition(shown: Shown, accept: str) -> WebContent:
    """All metrics in the format that ``accept`` asks for: OpenMetrics, or Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(shown.status))
    encoder, kind = choose_encoder(accept)
    return WebContent(encoder(registry), kind)


def families(status: JobStatus) -> Iterator[Metric]:
    """The metrics of ``status``."""
    yield InfoMetricFamily(_PREFIX + "job", "The job.", {"run_id": status.run_id})
    states = {state: state == status.state for state in _STATES}
    yield StateSetMetricFamily(_PREFIX + "state", "The state of the job.", states)
    yield from _members(status)
    yield from _progress(status)
    yield from _past(status)
    yield from _experts(status)


class _Collector:
    """Gives the registry the metrics of one moment."""

    def __init__(self, status: JobStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        return families(self._status)


def _members(status: JobStatus) -> Iterator[Metric]:
    yield _gauge("generation", "The newest decided generation.", status.generation.decided)
    ranks = GaugeMetricFamily(_PREFIX + "ranks", "Ranks by standing; members train.", labels=["standing"])
    for standing in _STANDINGS:
        ranks.add_metric([standing], sum(each.standing == standing for each in status.ranks.values()))
    yield ranks
    yield _gauge("nodes_alive", "Nodes whose agent is present.", sum(node.alive for node in status.nodes.values()))
    protection = status.history.protection
    yield _gauge("tolerated_rank_losses", "Ranks that may be lost at once without losing state.", protection.ranks)
    yield _gauge("tolerated_node_losses", "Nodes that may be lost at once without losing state.", protection.nodes)
    yield _gauge("short_blocks", "State blocks that lack copies for now.", protection.short)
    idle = GaugeMetricFamily(
        _PREFIX + "worker_idle_seconds", "Seconds since a worker of this node last made progress.", labels=["rank"]
    )
    for rank, worker in status.workers_here.items():
        idle.add_metric([str(rank)], worker.idle_s)
    yield idle


def _progress(status: JobStatus) -> Iterator[Metric]:
    progress = status.progress
    if progress is None:
        return
    yield _gauge("step", "The newest committed step.", progress.step)
    yield _gauge("samples", "Samples consumed so far.", progress.samples)
    yield _gauge("step_duration_seconds", "Duration of the newest step.", progress.step_s)
    yield _gauge("since_step_seconds", "Seconds since the newest step was committed.", progress.ago_s)
    if progress.target is not None:
        yield _gauge("target_step", "The last step of the run.", progress.target)
    if progress.steps_per_s is not None:
        yield _gauge("steps_per_second", "Rate of the last minute of steps.", progress.steps_per_s)
    if progress.left_s is not None:
        yield _gauge("left_seconds", "Estimated time until the last step.", progress.left_s)
    if progress.loss is not None:
        yield _gauge("loss", "The first value that the loss function reports.", progress.loss)


def _past(status: JobStatus) -> Iterator[Metric]:
    past = status.history
    yield _counter("losses", "Lost processes.", past.losses)
    yield _counter("recoveries", "Recoveries from losses, after which steps went on.", past.recoveries)
    yield _counter("member_changes", "Changes of members without a loss.", past.changes)
    yield _counter("repeated_steps", "Committed steps that were computed again.", past.lost_steps)
    recovering = (past.mttr_s or 0.0) * past.recoveries
    yield _counter("recovery_seconds", "Time of recoveries, from noticing a loss to going on.", recovering)
    yield _counter("unprotected_seconds", "Time with too few mirrors of some block after a loss.", past.unprotected_s)
    lost = CounterMetricFamily(_PREFIX + "lost_seconds", "Lost time by cause.", labels=["cause"])
    for cause, seconds in past.lost_s.items():
        lost.add_metric([cause], seconds)
    yield lost
    yield _gauge("stepping_seconds", "Time since the first committed step of this launch.", past.stepping_s)
    if past.goodput is not None:
        yield _gauge("goodput_ratio", "Share of that time that went into steps that count.", past.goodput)


def _experts(status: JobStatus) -> Iterator[Metric]:
    load = status.expert_loads
    if load is None:
        return
    yield _gauge(
        "expert_rank_load_ratio", "Tokens of the busiest rank that shares experts, to a mean rank's.", load.imbalance
    )
    ratios = GaugeMetricFamily(
        _PREFIX + "expert_load_ratio", "Tokens of a layer's busiest expert, to a mean expert's.", labels=["layer"]
    )
    for one in load.busiest:
        ratios.add_metric([str(one.layer)], one.ratio)
    yield ratios


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Any:
    return CounterMetricFamily(_PREFIX + name, text, value=value)
