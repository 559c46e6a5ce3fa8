"""Whom suspicions, hangs and repeated failures blame."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.control.failures import Failures
from megatron.elastic.control.suspicion import Accusation, Idle, Ruling, Suspicions, cut_off, hang_verdict, sinks
from megatron.elastic.control.timing import Timing
from tests.unit.calls import calls_in, lines_in


def idle(*waiting_for: int, seconds: float = 100.0, limit: float = 30.0) -> Idle:
    return Idle(5, "reduce", waiting_for, seconds, limit)


def test_the_sink_of_a_chain_is_blamed_not_those_who_wait() -> None:
    assert sinks({0: (1,), 1: (2,), 2: (3,), 3: ()}) == (3,)


def test_a_circle_blames_no_rank() -> None:
    assert sinks({0: (1,), 1: (2,), 2: (0,)}) == ()
    assert hang_verdict({0: idle(1), 1: idle(0)}) is None


def test_the_sink_most_waited_for_comes_first_and_a_rank_without_a_row_is_one() -> None:
    assert sinks({0: (7,), 1: (7,), 2: (3,), 3: ()}) == (7, 3)


def test_the_search_for_a_sink_costs_as_many_more_calls_as_there_are_more_ranks() -> None:
    """The coordinator makes it on the thread that renews its lease."""

    def calls(ranks: int) -> int:
        chain: dict[int, tuple[int, ...]] = {rank: (rank + 1,) for rank in range(ranks)}
        return calls_in(lambda: sinks({**chain, ranks: ()}))

    assert calls(256) < 5 * calls(64)


def test_no_rank_is_blamed_while_one_makes_progress() -> None:
    table = {0: idle(2), 1: idle(2), 2: idle()}
    verdict = hang_verdict(table)
    assert verdict is not None and verdict.rank == 2 and "step 5" in verdict.why
    assert hang_verdict({**table, 3: idle(seconds=1.0)}) is None
    assert hang_verdict({**table, 2: idle(limit=600.0)}) is None


@given(st.dictionaries(st.integers(0, 7), st.lists(st.integers(0, 7), max_size=4).map(tuple), max_size=8))
def test_a_sink_never_waits_and_is_always_waited_for(waiting: dict[int, tuple[int, ...]]) -> None:
    for rank in sinks(waiting):
        assert not waiting.get(rank)
        assert any(rank in targets for targets in waiting.values())


LIVING = {0: 0, 1: 0, 2: 0, 3: 0}
NODES = {0: 0, 1: 0, 2: 1, 3: 1}


def test_two_that_blame_each_other_reconnect_first_and_then_the_higher_goes() -> None:
    suspicions = Suspicions()
    suspicions.add(4, Accusation(1, 2, "link"))
    suspicions.add(4, Accusation(2, 1, "link"))
    first = suspicions.verdict(LIVING, NODES)
    assert first is not None and first.kind == "reform"
    suspicions.add(5, Accusation(2, 1, "link"))
    again = suspicions.verdict(LIVING, NODES)
    assert again is not None and (again.kind, again.rank) == ("condemn", 2)


def test_the_one_blamed_by_more_goes() -> None:
    suspicions = Suspicions()
    for generation in (1, 2):
        for by in (2, 3):
            suspicions.add(generation, Accusation(by, 0))
        verdict = suspicions.verdict(LIVING, NODES)
    assert verdict is not None and (verdict.kind, verdict.rank) == ("condemn", 0)


def test_a_healthy_rank_is_not_blamed_for_a_dead_peer() -> None:
    suspicions = Suspicions()
    suspicions.add(1, Accusation(0, 3))
    suspicions.add(1, Accusation(3, 0))
    assert suspicions.verdict({0: 0, 1: 0, 2: 0}, NODES) is None, "3 died: neither accusation stands"


def silence(generation: int, *pairs: tuple[int, int], before: Suspicions | None = None) -> tuple[Suspicions, Ruling]:
    """Each rank on a node of its own; the first rank of a pair finds the host of the second silent."""
    suspicions = before or Suspicions()
    for by, rank in pairs:
        suspicions.add(generation, Accusation(by, rank, silent=(rank,)))
    ranks = range(5)
    verdict = suspicions.verdict(dict.fromkeys(ranks, 0), {rank: rank for rank in ranks})
    assert verdict is not None
    return suspicions, verdict


def test_nodes_without_a_path_reconnect_first_and_then_the_one_that_reaches_fewest_others_goes() -> None:
    suspicions, first = silence(1, (1, 0), (2, 0))
    assert first.kind == "reform" and first.why == "no data passes between nodes 0 and 1, 0 and 2"
    _, again = silence(2, (1, 0), (2, 0), before=suspicions)
    assert (again.kind, again.nodes) == ("cut off", (0,))


def test_silence_between_other_nodes_is_a_first_time() -> None:
    suspicions, _ = silence(1, (1, 0))
    assert silence(2, (3, 2), before=suspicions)[1].kind == "reform"


def test_the_smaller_half_of_a_network_goes_and_of_two_nodes_the_higher() -> None:
    assert cut_off({frozenset((0, 1))}) == (1,)
    assert cut_off({frozenset((here, there)) for here in (0, 1) for there in (2, 3, 4)}) == (0, 1)
    assert cut_off({frozenset((here, there)) for here in (0, 1, 2) for there in (3, 4)}) == (3, 4)


@given(st.sets(st.frozensets(st.integers(0, 7), min_size=2, max_size=2)))
def test_nodes_that_are_left_reach_one_another_and_some_are_left(apart: set[frozenset[int]]) -> None:
    gone = set(cut_off(apart))
    assert not any(pair.isdisjoint(gone) for pair in apart)
    assert not apart or set().union(*apart) - gone


def test_a_new_incarnation_starts_with_a_clean_record() -> None:
    suspicions = Suspicions()
    suspicions.add(1, Accusation(0, 3))
    suspicions.verdict(LIVING, NODES)
    suspicions.add(2, Accusation(0, 3))
    verdict = suspicions.verdict({**LIVING, 3: 1}, NODES)
    assert verdict is not None and verdict.kind == "reform"


def test_an_error_at_the_same_step_twice_ends_the_job_but_signals_do_not() -> None:
    failures = Failures()
    assert failures.record(1, 0, 7, raised=False, now=0) is None
    assert failures.record(2, 0, 7, raised=False, now=1) is None
    assert failures.record(1, 1, 7, raised=True, now=2) is None
    assert failures.record(1, 2, 8, raised=True, now=3) is None
    assert "step 7" in (failures.record(3, 0, 7, raised=True, now=4) or "")


def test_losses_per_hour_are_counted_in_a_sliding_hour() -> None:
    failures = Failures(max_per_hour=2)
    assert failures.record(0, 0, 1, False, now=0) is None
    assert failures.record(1, 0, 2, False, now=10) is None
    assert failures.record(2, 0, 3, False, now=3605) is None
    assert "--elastic-max-losses-per-hour" in (failures.record(3, 0, 3, False, now=3606) or "")


def test_the_count_of_many_losses_at_once_costs_each_no_more_than_the_first() -> None:
    """If the state is lost, all ranks end at once, and each agent counts them all."""

    def lines(losses: int) -> int:
        failures = Failures()
        return lines_in(lambda: [failures.record(rank, 0, 3, False, now=0.0) for rank in range(losses)])

    assert lines(400) < 5 * lines(100)


def test_a_rank_that_never_gets_anywhere_is_given_up_with_growing_pauses() -> None:
    failures = Failures()
    failures.admitted(1, 0)
    assert not failures.failed_to_join(1, 0), "the loss of a member is no failed start"
    assert failures.cool_down(1) == 0
    assert not failures.failed_to_join(1, 1)
    first = failures.cool_down(1)
    assert not failures.failed_to_join(1, 2)
    assert failures.cool_down(1) > first > 0
    assert failures.failed_to_join(1, 3)
    failures.admitted(1, 4)
    assert failures.cool_down(1) == 0 and not failures.failed_to_join(1, 4)


def test_starting_anew_is_fine_while_it_gets_further() -> None:
    failures = Failures()
    for step in (5, 9, 12, 13):
        failures.record(0, 0, step, False, now=0)
        assert failures.started_anew() is None
    for _ in range(2):
        failures.record(0, 0, 13, False, now=0)
        verdict = failures.started_anew()
    assert "before step 14 was complete" in (verdict or "")


@given(st.floats(0.01, 100))
def test_all_timeouts_keep_their_order_whatever_the_setting(unit: float) -> None:
    timing = Timing.derive(unit)
    assert 2 * timing.look + timing.stopped <= unit, "a stopped process is found within the detection time-out"
    assert timing.beat < timing.fence < timing.lease < timing.hang < timing.hang_unknown
    assert timing.lease < timing.silent + timing.apart < timing.hang, "a lost node is no cut-off one, nor a hang"
    assert timing.unseen < timing.hang, "a wait that is over is known before a hang is looked for"
    assert Timing.derive(unit, 1e6).hang_unknown == 1e6, "a script may need longer for its set-up"
    assert Timing.derive(unit, 600 * unit) == timing
    assert timing.fence + 2 * timing.beat < timing.lease, "workers fence themselves before others count them lost"
