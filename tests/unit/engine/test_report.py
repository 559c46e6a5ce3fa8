"""Where ranks stand in the program: everybody draws the same conclusion from the same reports."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.comm.address import Address
from megatron.elastic.control.membership import Decision, each_once
from megatron.elastic.engine.generation.report import (
    NEWCOMER,
    Report,
    joined_since_vote,
    newcomers,
    phase_is_over,
    reports_of,
)
from megatron.elastic.state.protocol import Holdings
from megatron.elastic.state.record import GradientKey, StepRecord

REPORT = st.builds(
    lambda phase, done, version, under_way, failures, doubts, reporter: Report(
        *(Holdings(version, version), phase, done, version, "assignment", failures, under_way),
        doubts=doubts,
        reporter=reporter,
    ),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 5),
    st.booleans(),
    st.dictionaries(st.integers(1, 4), st.text(max_size=8), max_size=2),
    st.dictionaries(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(0, 9)), st.integers(0, 7), max_size=2),
    st.integers(0, 7),
)


@given(REPORT)
def test_a_report_survives_its_text(report: Report) -> None:
    assert Report.from_text(report.to_text()) == report


def test_equal_reports_and_equal_records_of_others_are_one_object() -> None:
    reports = {
        rank: Report(Holdings(1, 1, records=(StepRecord(1), StepRecord(2 + rank // 2))), 1, False, 1, "assignment")
        for rank in range(4)
    }
    texts, text_of = each_once({**{rank: report.to_text() for rank, report in reports.items()}, 4: NEWCOMER})
    assert len(texts) == 3
    decision = Decision(2, {}, "loss", texts=texts, text_of=text_of)
    found = reports_of(decision)
    assert found == reports and decision.reports == {**{r: each.to_text() for r, each in reports.items()}, 4: NEWCOMER}
    assert found[0] is found[1] and found[0] is not found[2]
    assert found[0].holdings.records[0] is found[2].holdings.records[0]


def test_who_has_no_report_or_an_empty_one_is_a_newcomer() -> None:
    texts, text_of = each_once({0: "held", 2: NEWCOMER, 3: "held"})
    members = {rank: Address(rank, 0, "h") for rank in range(4)}
    assert newcomers(Decision(2, members, "loss", texts=texts, text_of=text_of)) == (1, 2)


@given(st.lists(REPORT, min_size=1, max_size=5))
def test_a_phase_is_over_when_a_rank_has_left_it_or_all_have_done_it(reports: list[Report]) -> None:
    by_rank = dict(enumerate(reports))
    newest = max(report.phase if report.under_way else report.phase + 1 for report in reports)
    for phase in {report.phase for report in reports}:
        # Who is still in the phase before (a step being finished) has not done it either.
        waiting = [report for report in reports if report.phase < phase or not report.done]
        logged = {report.reporter for report in reports} <= set(by_rank)
        assert phase_is_over(phase, by_rank, set(by_rank)) == (phase < newest or (not waiting and logged))
        assert phase_is_over(phase, by_rank, {*by_rank, 8}) == (phase < newest), "a newcomer has not done it"


def test_the_ranks_admitted_after_the_generation_of_the_newest_vote_have_joined_since() -> None:
    record = StepRecord(5, gradient=GradientKey(4, 3))
    reports = {
        rank: Report(Holdings(5, 5, records=(record,)), 1, False, 5, "assignment", admitted=admitted)
        for rank, admitted in enumerate((0, 3, 4))
    }
    assert joined_since_vote(reports) == {2}
