"""An agent shows each event of its job once: to the URL of ``--elastic-webhook``, on its pages, and in its report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.events import Event, Lost
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.observations import Stepping
from megatron.elastic.launch.agent.admin import Sources
from megatron.elastic.launch.agent.display import Display
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.arguments import parse
from tests.receiver import Receiver, receiver

LOSS = Lost((Loss(1, 0, "h", "signal SIGKILL"),), (4,), 3.0)


@pytest.fixture
def server() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


@pytest.fixture
def shown(server: Receiver, tmp_path: Path) -> Iterator[tuple[Display, Sources]]:
    script = tmp_path / "train.py"
    script.write_text("")
    job = parse([str(script), "--elastic", "--elastic-webhook", server.url])
    sources = Sources(job.run_id, Generations({0: Node("h", (0, 1))}), JobHistory(), JobClock())
    loop = Loop()
    display = Display(job, loop, 0, sources, list[Event]().append)
    yield display, sources
    display.close()
    loop.close()


def happens(sources: Sources, *events: Event) -> None:
    for event in events:
        sources.state.apply(event)
        sources.history.follow(event, sources.state)


def test_a_loss_and_the_end_are_told_once(
    shown: tuple[Display, Sources], server: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    display, sources = shown
    happens(sources, Stepping(1, at=0.0), LOSS)
    for _ in range(2):
        display.follow(coordinates=True)
        display.beat((), coordinates=True)
    for _ in range(2):
        display.end(4, "no state")
    display.wait()
    told = [(message["event"], message["state"]) for _, message in server.wait(2)]
    assert told == [("loss", "starting"), ("end", "ended")]
    assert capsys.readouterr().err.count("ends with exit status 4") == 1


def test_an_agent_that_does_not_coordinate_tells_no_loss_and_repeats_none_when_it_does(
    shown: tuple[Display, Sources], server: Receiver
) -> None:
    display, sources = shown
    happens(sources, Stepping(1, at=0.0), LOSS)
    display.follow(coordinates=False)
    display.follow(coordinates=True)
    happens(sources, Lost((Loss(0, 0, "h", "signal SIGTERM"),), (7,), 9.0))
    display.follow(coordinates=True)
    display.wait()
    ((_, only),) = server.wait(1)
    assert [loss["cause"] for loss in only["losses"]] == ["signal SIGTERM"]
