"""A rank is killed while the others recover from a loss: recovery begins anew with what is held then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import pytest

from megatron.elastic.engine.inject import RELAY_POINTS
from megatron.elastic.engine.transaction.phases import StepBody
from tests.cluster.checks import check
from tests.cluster.cluster import Cluster, run

IN_RECOVERY = (
    "in_recovery_freeze",
    "in_recovery_decide",
    "in_recovery_edit",
    "in_recovery_promote",
    "in_recovery_resume",
)
BEFORE_THE_VOTE, AFTER_THE_VOTE = "after_ship", "mid_update"


def killed(cluster: Cluster) -> list[int]:
    """Ranks that were lost, in order."""
    return [p.rank for p in cluster.processes if p.process.dead and p.norm is None]


@pytest.mark.parametrize("first", [BEFORE_THE_VOTE, AFTER_THE_VOTE])
@pytest.mark.parametrize("second", IN_RECOVERY)
def test_a_second_loss_in_the_recovery(first: str, second: str) -> None:
    """With two mirrors no two losses lose anything. Which rank goes second changes with the case."""
    rank = 1 + IN_RECOVERY.index(second) % 3
    cluster = run(f"steps=4 seed={rank} mirrors=2 kill:rank=0,step=2,point={first} kill:rank={rank},point={second}")
    assert set(killed(cluster)) == {0, rank}
    check(cluster)


def test_the_two_ranks_of_a_stage_are_lost() -> None:
    """Copies of its state lie elsewhere, but no rank computes it: the members wait for these to come back."""
    faults = "kill:rank=0,step=2,point=after_reduce kill:rank=1,point=in_recovery_edit"
    cluster = run(f"steps=4 seed=3 mirrors=2 {faults}")
    assert killed(cluster) == [0, 1] or killed(cluster) == [1, 0]
    assert any("are gone" in line for process in cluster.finished for line in process.notices)
    check(cluster)
    assert {process.rank for process in cluster.finished} == {0, 1, 2, 3}


def test_a_vote_that_only_the_lost_rank_knew_of() -> None:
    """In one pipeline nothing holds a rank back after the vote. The others take that vote again."""

    def was_known_to_nobody_else(seed: int) -> bool:
        cluster = run(f"pp3dp1 steps=4 seed={seed} mirrors=2 kill:rank=1,step=2,point=mid_update")
        check(cluster)
        first = [process.recoveries[0].resolution for process in cluster.finished if process.incarnation == 0]
        assert len(first) == 2, "both survivors recover"
        return {resolution.version for resolution in first} == {1}

    assert any(was_known_to_nobody_else(seed) for seed in range(50)), "no schedule has it: the case is not tried"


def test_state_without_a_copy_is_not_made_up() -> None:
    """Without mirrors any loss takes state along, and each rank that is left says so."""
    cluster = run("steps=4 mirrors=0 kill:rank=3,step=2,point=before_vote")
    errors = [process.error for process in cluster.processes if process.error is not None]
    assert errors and not cluster.finished
    assert "state of step 1 is lost" in str(errors[0])


@pytest.mark.parametrize("point", ["mid_backward", "after_vote", "mid_gather"])
def test_exact_mode_ends_with_the_same_bits(point: str) -> None:
    cluster = run(f"steps=4 seed=1 exact=on kill:rank=2,step=2,point={point}")
    check(cluster)
    reference = run("steps=4 exact=on").finished[0]
    assert {process.norm for process in cluster.finished} == {reference.norm}


@pytest.mark.parametrize("point", ["mid_backward", "before_reduce"])
def test_exact_mode_refuses_a_gradient_that_is_not_finite_as_the_default_does(point: str) -> None:
    """The step is computed again, and the fault, which happens once, leaves no trace."""
    cluster = run(f"dp3 steps=3 seed=1 exact=on nonfinite:rank=1,step=2,point={point}")
    check(cluster)
    votes = Counter((passed.rank, passed.step) for passed in cluster.passed if passed.point == "before_vote")
    assert votes == {(rank, step): 2 if step == 2 else 1 for rank in range(3) for step in (1, 2, 3)}


@pytest.mark.parametrize("point", ["mid_update", "after_update", "mid_gather"])
def test_copies_that_receive_the_result(point: str) -> None:
    """``--elastic-snapshot state``: mirrors are sent stepped blocks, so a loss may take all back by one version."""
    cluster = run(f"steps=4 seed=2 snapshot=state kill:rank=1,step=2,point={point}")
    check(cluster)


@pytest.mark.parametrize("seed", [3, 6, 14])
def test_copies_that_came_with_the_gradients_of_a_step_are_brought_to_it_in_state_mode(seed: int) -> None:
    """Rank 1 is back, its copies came over streams, and rank 2 dies before it sends stepped blocks."""
    lost = "kill:rank=1,step=2,point=before_reduce kill:rank=2,point=in_migration_switch"
    late = "delay:point=after_reduce,seconds=0.05,count=0"
    check(run(f"dp3 steps=5 seed={seed} back=0.05 evaluate=0 snapshot=state mirrors=2 {lost} {late}"))


@pytest.mark.parametrize("seed", [2, 3])
def test_a_second_loss_finds_only_some_ranks_back_at_the_version_before_in_state_mode(seed: int) -> None:
    """The vote that is undone had named another placement. Rank 0 has taken it over, rank 1 has yet to."""
    first = "kill:rank=4,step=1,point=after_ship kill:rank=3,point=in_migration_switch"
    later = "delay:rank=2,step=2|3|4|5,point=in_recovery_edit,seconds=0.1"
    second = "kill:rank=2,step=2|3|4|5,point=in_recovery_promote"
    late = "delay:rank=1,step=2|3|4|5,point=in_recovery_decide,count=0,seconds=0.2"
    settings = "back=never evaluate=0 migrate_after=-1 mirrors=4 snapshot=state"
    check(run(f"dp5 steps=6 seed={seed} {settings} {first} {later} {second} {late}"))


@pytest.mark.parametrize("point", ["mid_backward", "after_vote", "mid_gather"])
@pytest.mark.parametrize("layout", ["tp2pp2dp1", "pp3dp1"])
@pytest.mark.parametrize("snapshot", ["gradient", "state"])
def test_owners_that_do_not_compute_their_units_step_them(
    layout: str, point: str, snapshot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only copies are in other stages. Steps are committed before the migration has brought owners back."""
    relayed: dict[int, int] = {}
    gather = StepBody.gather

    def noted(self: StepBody, step: int, came: Collection[int] = ()) -> None:
        blocks = sum(map(len, self._view.relays.to_owners.outgoing.values()))
        relayed[step] = relayed.get(step, 0) + blocks
        gather(self, step, came)

    monkeypatch.setattr(StepBody, "gather", noted)
    flags = "tensor=park back=never" if layout == "tp2pp2dp1" else "back=soon"
    cluster = run(f"{layout} steps=8 mirrors=2 snapshot={snapshot} {flags} kill:rank=1,step=2,point={point}")
    check(cluster)
    steps = [step for step, blocks in relayed.items() if blocks]
    assert len(steps) > 1, "no step was committed with such owners: the case is not tried"
    assert max(steps) < 8, "owners are back with the ranks that compute their units"


@pytest.mark.parametrize("point", RELAY_POINTS)
@pytest.mark.parametrize(
    ("layout", "tensor", "rank"),
    [
        ("tp2pp2dp1", "park", 0),
        ("tp2pp2dp1", "park", 2),
        ("tp2pp2dp1", "live-on", 0),
        ("pp4dp1", "live-on", 0),
        ("pp4dp1", "live-on", 2),
        ("tp4pp2dp1", "live-on", 0),
    ],
)
def test_a_loss_among_the_messages_of_owners_and_delegates(layout: str, tensor: str, rank: int, point: str) -> None:
    """Rank 1 is gone and its blocks are stepped elsewhere. A rank that sends or receives them dies in the exchange."""
    first = "kill:rank=1,step=2,point=mid_backward"
    cluster = run(f"{layout} steps=8 mirrors=3 tensor={tensor} back=soon {first} kill:rank={rank},point={point}")
    assert set(killed(cluster)) == {1, rank}
    assert all(outcome.lost_steps == 0 for process in cluster.processes for outcome in process.recoveries)
    check(cluster)
