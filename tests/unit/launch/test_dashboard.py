"""The live page in a real browser: it draws the topology, the curves and the recoveries of a given state."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from megatron.elastic.config import ElasticConfig
from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.membership import Committed
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.observations import DrawnCell, DrawnSegment, DrawnTopology
from megatron.elastic.launch.agent.admin import Sources
from megatron.elastic.launch.agent.pages import Pages
from megatron.elastic.launch.agent.step_meter import StepSample
from megatron.elastic.launch.agent.web import Shown
from tests.browser import Element, needs_browser, rendered
from tests.unit.control.test_status_text import STATUS

pytestmark = [pytest.mark.slow, needs_browser]

TOKEN = "0123456789abcdef"
TOPOLOGY = DrawnTopology(
    generation=3,
    step=118,
    units=10,
    cells=(DrawnCell(0, (0,), 500_000, 8), DrawnCell(1, (1,), 1_000_000, 4), DrawnCell(2, (2,), 1_000_000, 4)),
    segments=(DrawnSegment(0, 0, 0, 5), DrawnSegment(0, 1, 5, 10), DrawnSegment(1, 0, 0, 5), DrawnSegment(1, 2, 5, 10)),
    mirrors=((0, 1, 6), (1, 2, 3), (2, 0, 3)),
)
SAMPLES = tuple(
    StepSample(10.0 * step, Committed(step, 500, 8 * step, 1.0 + step % 3, 5.0 - step / 10)) for step in range(31, 41)
)


@pytest.fixture(scope="module")
def pages() -> Iterator[Pages]:
    sources = Sources("job", Generations({0: Node("h", (0,))}), JobHistory(), JobClock())
    served = Pages(ElasticConfig(dashboard="0"), TOKEN, sources)
    (server,) = served._servers
    hostile = msgspec.structs.replace(
        STATUS, tolerance=msgspec.structs.replace(STATUS.tolerance, text="<img src=x onerror=document.title='owned'>")
    )
    server.show(Shown(hostile, SAMPLES, TOPOLOGY, 400.0))
    yield served
    served.close()


@pytest.fixture(scope="module")
def page(pages: Pages) -> list[Element]:
    return rendered(f"http://127.0.0.1:{pages._servers[0].port}/#token={TOKEN}")


def of(page: list[Element], attribute: str) -> list[str]:
    return [element[attribute] for element in page if attribute in element]


def text(page: list[Element], name: str) -> str:
    return "\n".join(element.text for element in page if element.name == name)


def test_every_rank_is_drawn_where_it_computes_and_as_it_is(page: list[Element]) -> None:
    places = [(one["data-rank"], one["data-standing"]) for one in page if "data-rank" in one]
    assert places == [("0", "member"), ("1", "member"), ("0", "member"), ("2", "member"), ("3", "starting")]
    boxes = [(float(one["x"]), float(one["width"])) for one in page if one.get("class") == "segment"]
    assert len(boxes) == 4 and boxes[0] == boxes[2] and boxes[1] == boxes[3], "stages of the replicas are aligned"
    assert "stage 0: units 0 to 4, 8 samples, 50% of speed" in text(page, "text")


def test_owners_are_joined_with_their_mirrors(page: list[Element]) -> None:
    assert of(page, "data-mirror") == ["0-1", "1-2", "2-0"]
    assert "rank 1 mirrors 6 blocks of rank 0" in text(page, "title")


def test_step_time_and_loss_are_curves_with_the_events_marked(page: list[Element]) -> None:
    assert of(page, "data-points") == ["10", "10"]
    classes = of(page, "class")
    assert classes.count("loss-mark") == 2 and classes.count("recovery-mark") == 2, "one each in both charts"
    assert "rank 3 lost: signal SIGKILL" in text(page, "title")


def test_a_recovery_is_a_bar_of_its_phases(page: list[Element]) -> None:
    bars = {one["data-phase"]: float(one["width"]) for one in page if "data-phase" in one}
    assert list(bars) == ["decide", "edit", "plan", "settle", "computed again"]
    assert bars["edit"] == pytest.approx(10 * bars["plan"]) and sum(bars.values()) == pytest.approx(550)


def test_the_figures_are_those_of_the_status(page: list[Element]) -> None:
    figures = dict(zip(text(page, "dt").split("\n"), text(page, "dd").split("\n"), strict=True))
    assert figures["step"] == "120 of 500" and figures["losses"] == "1" and figures["MTTR"] == "0.184 s"
    assert figures["a step"] == "2.000 s" and figures["last step"] == "0.400 s ago"
    assert figures["goodput"] == "99.31 %" and figures["members"] == "3 of 4"
    assert figures["tokens, busiest rank"] == "1.32 × mean"


def test_text_from_workers_is_text(page: list[Element]) -> None:
    assert "<img src=x" in text(page, "p") and "img" not in {element.name for element in page}


def test_without_the_token_nothing_of_the_job_is_shown(pages: Pages) -> None:
    page = rendered(f"http://127.0.0.1:{pages._servers[0].port}/")
    assert "a token is needed" in text(page, "span")
    assert not of(page, "data-rank") and "llama" not in text(page, "h1")


def test_an_address_that_no_token_can_be_read_from_is_told(pages: Pages) -> None:
    page = rendered(f"http://127.0.0.1:{pages._servers[0].port}/#token=100%")
    assert "URI malformed" in text(page, "span")
