"""Layers and copies change place while steps go on, and a rank is killed anywhere in it."""

from __future__ import annotations

import pytest

from tests.cluster.checks import check
from tests.cluster.cluster import Cluster, run

LOSS = "kill:rank=1,step=2,point=after_reduce"
"""Of four ranks: three are left, who do better in another cut."""
MOVING = "steps=8 heavy=on migrate_after=1"
POINTS = ("in_migration_begin", "in_migration_finish", "in_migration_switch")


def whole_pipelines(cluster: Cluster) -> int:
    """Pipelines of the assignment at the end whose cells all live."""
    engine = cluster.finished[0].engine
    assert engine is not None
    living = set(engine.view.assignment.whole(engine.view.living))
    return sum(all(part.cell in living for part in replica.segments) for replica in engine.view.assignment.replicas)


def test_layers_move_to_who_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = run(f"{MOVING} seed=1 back=never {LOSS}")
    check(cluster, settled=True)
    assert whole_pipelines(cluster) == 2, "the cell that had lost its pipeline is one by itself"
    said = [line for line in capsys.readouterr().out.splitlines() if "move to other ranks" in line]
    assert len(said) == 1, "one rank speaks for all"


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_while_layers_move(point: str, rank: int) -> None:
    """Two mirrors: a second loss leaves a copy of every block, wherever copies are on their way."""
    cluster = run(f"{MOVING} seed={rank} mirrors=2 {LOSS} kill:rank={rank},step=2-6,point={point}")
    assert len([p for p in cluster.processes if p.process.dead and p.norm is None]) >= 2
    check(cluster)
