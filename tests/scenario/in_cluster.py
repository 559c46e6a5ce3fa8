"""A scenario in the in-process cluster: the engine itself, in the order of events that the seed draws."""

from __future__ import annotations

from megatron.elastic.engine.transaction.agreement import StateLost
from tests.cluster.checks import check
from tests.cluster.cluster import run
from tests.scenario.in_model import Ending
from tests.scenario.scenario import Scenario

__all__ = ["play"]


def play(scenario: Scenario) -> Ending:
    """Run ``scenario`` and check what holds after every run. Raises ``AssertionError``; "lost" if state is lost."""
    cluster = run(scenario)
    if any(isinstance(process.error, StateLost) for process in cluster.processes):
        return "lost"
    check(cluster)
    return "kept"
