"""The losses that can be survived now are told in one line, once, by one rank, whenever they change."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.elastic.control.observations import Protection
from megatron.elastic.observe.event_kinds import ToleranceEvent
from megatron.elastic.observe.events import EventLog, read_events
from megatron.elastic.runtime.tolerance import Tolerances, line
from megatron.elastic.state.domains import FailureDomains
from megatron.elastic.state.ownership import Copies, Placement
from megatron.elastic.state.tolerance import tolerance


def domains_of(*labels: str) -> FailureDomains:
    return FailureDomains.of(dict(enumerate(labels)), dict(enumerate(labels)))


def said(blocks: list[tuple[int, ...]], domains: FailureDomains, mirrors: int, store: bool = False) -> str:
    placement = Placement({(0, 0, i): Copies(ranks[0], ranks[1:]) for i, ranks in enumerate(blocks)})
    return line(tolerance(placement, domains, mirrors), domains, store)


def test_the_line_names_what_state_survives_and_what_it_does_not() -> None:
    four = domains_of("a", "b", "c", "d")
    assert said([(0, 1), (2, 1)], four, 1) == (
        "state now survives the loss of any 1 rank or of any 1 node; not of nodes a and b together (2 of 6 pairs)"
    )
    assert said([(0, 1, 2)], four, 2, store=True) == (
        "state now survives the loss of any 2 ranks or of any 2 nodes; not of nodes a and b and c together "
        "(1 of 4 sets of 3); the loss of node 0 ends the job: its launcher serves the store"
    )
    assert said([(0, 1), (2, 3)], domains_of("a", "a", "b", "b"), 1) == (
        "state now survives the loss of any 1 rank; not of node a (2 of 2 nodes)"
    )
    assert said([(0, 1), (2,)], four, 1) == (
        "state now is lost with node c (1 of 4 nodes); 1 of 2 blocks lack copies for now"
    )
    assert said([(0, 1), (1, 2)], domains_of("a", "a", "a"), 1) == (
        "state now survives the loss of any 1 rank; not of ranks {0,1} together (2 of 3 pairs); "
        "all ranks are on one node"
    )
    racks = domains_of("x/a", "x/b", "y/c")
    assert "any 1 rank or of any 1 node or of any 1 rack" in said([(0, 2), (1, 2)], racks, 1)


def test_it_is_told_when_it_changes_and_by_the_lowest_rank_alone(tmp_path: Path, capsys: Any) -> None:
    domains, heard = domains_of("a", "b", "c"), list[str]()
    numbers = list[Protection]()

    def announce(text: str, protection: Protection) -> None:
        heard.append(text)
        numbers.append(protection)

    both = Placement({(0, 0, 0): Copies(0, (1,)), (0, 0, 1): Copies(1, (2,))})
    same, fewer = Placement(dict(both.copies)), Placement({(0, 0, 0): Copies(0), (0, 0, 1): Copies(1, (2,))})
    log = EventLog(tmp_path, 0)
    lowest = Tolerances(0, 1, log, announce, False)
    other = Tolerances(1, 1, log, announce, False)
    for step, placement in enumerate((both, both, same, fewer, both), 1):
        for rank in (lowest, other):
            named = SimpleNamespace(digest=placement.digest())
            view = SimpleNamespace(living=(0, 1, 2), placement=placement, domains=domains, configuration=named)
            rank.look(view, step)  # type: ignore[arg-type]
    printed = capsys.readouterr().out.splitlines()
    assert printed == heard and len(heard) == 3
    assert "lack copies" in heard[1] and heard[0] == heard[2]
    assert numbers == [Protection(1, 1, 0, 2), Protection(0, 0, 1, 2), Protection(1, 1, 0, 2)]
    events = [record.event for record in read_events(tmp_path)]
    assert [event.text for event in events if isinstance(event, ToleranceEvent)] == heard
    fatal = (("a", "b"), ("b", "c"))
    assert events[0] == ToleranceEvent(1, 1, 1, (), fatal, 0, heard[0], both.digest(), ((0, 1), (1, 2)))
