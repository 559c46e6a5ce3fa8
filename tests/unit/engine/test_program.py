"""A newcomer, told what is over, goes the way of those who were there, and joins them where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.failures import ActionFailed
from megatron.elastic.engine.transaction.fence import Program

STEPS = 4


class Stop(Exception):
    """The loop has come to the phase it is to be left in."""


@dataclass
class Loop:
    """A host's loop: after step ``n``, action ``k`` returns ``n * 10 + k``, or fails where ``failing`` says so."""

    actions: Sequence[int]
    """Of each step, how many follow it."""
    failing: frozenset[tuple[int, int]]
    program: Program = field(default_factory=Program)
    stop: Callable[[Program], bool] = lambda program: False
    seen: list[tuple[int, int, str]] = field(default_factory=list)
    """(step, action, what became of it) as this rank's host saw it."""
    worked: list[int] = field(default_factory=list)
    """Numbers of the phases this rank did itself."""

    def run(self, first: int = 0) -> None:
        for step in range(first, STEPS):
            self.program.enter_step()
            self._work()
            self.program.over()
            for action in range(self.actions[step]):
                self.seen.append((step, action, self._act(step, action)))

    def _act(self, step: int, action: int) -> str:
        try:
            return str(self._fenced(step, action))
        except ActionFailed as error:
            return f"failed: {error}"

    def _fenced(self, step: int, action: int) -> int:
        program = self.program
        program.enter()
        told = program.known_end()
        failure = f"{step}/{action}" if (step, action) in self.failing else ""
        if told is None:
            self._work()
            program.did(step * 10 + action, reporter=1)
            program.over(failure)
            if failure:
                raise ActionFailed(failure)
            return step * 10 + action
        program.over(told.failure)
        if told.failure:
            raise ActionFailed(told.failure)
        assert isinstance(told.result, int)
        return told.result

    def _work(self) -> None:
        if self.program.behind:
            return  # the end of a step that is committed
        if self.stop(self.program):
            raise Stop
        self.worked.append(self.program.phase)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], frozenset[tuple[int, int]], int]:
    """Actions after each step, which of them fail, and the phase that a newcomer is needed in."""
    actions = draw(st.lists(st.integers(0, 4), min_size=STEPS, max_size=STEPS))
    places = [(step, action) for step, count in enumerate(actions) for action in range(count)]
    failing = draw(st.frozensets(st.sampled_from(places))) if places else frozenset()
    return actions, failing, draw(st.integers(1, STEPS + len(places)))


@given(histories())
def test_a_newcomer_sees_what_the_members_saw_and_works_from_their_phase_on(
    history: tuple[list[int], frozenset[tuple[int, int]], int],
) -> None:
    actions, failing, needed = history
    whole, member = Loop(actions, failing), Loop(actions, failing, stop=lambda program: program.phase == needed)
    whole.run()
    with pytest.raises(Stop):
        member.run()
    place = member.program.place(needed)
    newcomer = Loop(actions, failing)
    newcomer.program.take(place)
    begins = [1 + step + sum(actions[:step]) for step in range(STEPS)].index(place.phase + 1)
    newcomer.run(begins)
    assert newcomer.seen == [seen for seen in whole.seen if seen[0] >= begins], "the host's loop goes the same way"
    assert newcomer.worked == [phase for phase in whole.worked if phase >= needed], "and does nothing twice"
    assert newcomer.program.phase == whole.program.phase and not newcomer.program.behind


def test_between_phases_a_newcomer_begins_with_the_next() -> None:
    member = Program()
    member.enter_step()
    member.over()
    place = member.place(first_open=2)
    assert (place.phase, place.inside, dict(place.ended)) == (1, False, {})
    newcomer = Program()
    newcomer.take(place)
    assert not newcomer.behind
    newcomer.enter_step()
    assert newcomer.phase == 2 and not newcomer.behind


def test_before_any_step_a_newcomer_begins_at_the_start() -> None:
    """Evaluation only: the second of two is under way."""
    member = Program()
    member.enter()
    member.did("first", reporter=1)
    member.over()
    member.enter()
    newcomer = Program()
    newcomer.take(member.place(first_open=2))
    assert not newcomer.inside
    newcomer.enter()
    told = newcomer.known_end()
    assert told is not None and told.result == "first"
    newcomer.over()
    newcomer.enter()
    assert newcomer.known_end() is None
