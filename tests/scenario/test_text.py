"""The text of a scenario is the scenario."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.config import ConfigError
from megatron.elastic.engine.inject import GRADIENT_POINTS, KILL_POINTS, STEP_POINTS, Fault
from tests.scenario.scenario import RETURNS, Layout, Scenario, Wish, parse

NUMBERS = st.integers(0, 40)
SETS = st.frozensets(NUMBERS, max_size=3)
SECONDS = st.floats(0.0, 1000.0)


@st.composite
def conditions(draw: st.DrawFn) -> Fault:
    """A fault of any rank, time and condition, of no kind yet."""
    conditional = {
        "losses": draw(st.none() | NUMBERS),
        "rejoin": draw(st.none() | NUMBERS),
        "missing": draw(st.booleans()),
        "wait": draw(st.integers(0, 3)),
    }
    return Fault("kill", draw(SETS), draw(SETS), incarnations=draw(SETS), **conditional)  # type: ignore[arg-type]


KINDS = ("kill", "stop", "exit", "raise", "oom", "delay", "slow", "flip", "nonfinite", "random")


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    """Any fault that a script can name."""
    kind = draw(st.sampled_from(KINDS))
    fault = replace(draw(conditions()), kind=kind)
    if kind == "random":
        kinds = tuple(draw(st.lists(st.sampled_from(("kill", "stop")), min_size=1, max_size=2)))
        points = draw(st.sampled_from([STEP_POINTS, ("mid_update",)]))
        fault = replace(fault, steps=frozenset(), kinds=kinds, points=points)
        return replace(fault, seed=draw(NUMBERS), rate=draw(st.floats(0.0, 1.0)), count=draw(NUMBERS))
    if kind == "slow":
        return replace(fault, factor=draw(st.floats(1.0, 1000.0)))
    known = GRADIENT_POINTS if kind == "nonfinite" else list(KILL_POINTS)
    points = tuple(draw(st.lists(st.sampled_from(known), min_size=1, max_size=2)))
    fault = replace(fault, points=points, nth=draw(st.integers(1, 4)), count=draw(NUMBERS))
    match kind:
        case "exit":
            return replace(fault, code=draw(st.integers(0, 255)))
        case "delay":
            return replace(fault, seconds=draw(SECONDS))
        case "flip":
            return replace(fault, copy=draw(st.sampled_from(("owner", "mirror"))), tensor="exp_avg")
    return fault


SIZES = st.integers(1, 4)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "mirrors": st.integers(0, 4),
        "exact": st.booleans(),
        "snapshot": st.sampled_from(["gradient", "state"]),
        "migrate_after": st.integers(-1, 50),
        "detection_timeout": st.floats(0.1, 10.0),
    },
)
BACK = st.sampled_from(["never", *RETURNS]) | st.floats(0.001, 9.0).map("{:.3f}".format)
SOME = st.lists(NUMBERS, min_size=1, max_size=2).map(tuple)
WISHES = st.one_of(
    st.builds(Wish, NUMBERS, ranks=st.just(()) | SOME),
    st.builds(Wish, NUMBERS, st.just("checkpoint")),
    st.builds(Wish, NUMBERS, st.just("admit"), SOME),
    st.builds(
        Wish, NUMBERS, st.just("reshape"), st.tuples(SIZES, SIZES, SIZES) | st.tuples(SIZES, SIZES, SIZES, SIZES)
    ),
)
SCENARIOS = st.builds(
    Scenario,
    layout=st.builds(Layout, SIZES, SIZES, SIZES, SIZES, context=SIZES),
    steps=NUMBERS,
    seed=NUMBERS,
    back=BACK,
    evaluate=NUMBERS,
    heavy=st.booleans(),
    micro_batches=st.integers(1, 8),
    settings=SETTINGS.map(lambda values: tuple(sorted(values.items()))),
    faults=st.lists(faults(), max_size=3).map(tuple),
    wishes=st.lists(WISHES, max_size=2).map(tuple),
)


@given(SCENARIOS)
def test_parse_is_the_inverse_of_str(scenario: Scenario) -> None:
    text = str(scenario)
    assert parse(text) == scenario, text
    assert str(parse(text)) == text


def test_what_is_left_out_is_the_default() -> None:
    assert str(Scenario()) == "pp2dp2"
    assert parse("") == Scenario()


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("qp2", "'qp2' is no layout"),
        ("colour=red", "is no layout, setting or fault"),
        ("back=later", "never, soon"),
        ("heavy=yes", "on or off"),
        ("kill:rank=1,point=nowhere", "unknown point 'nowhere'"),
        ("drain:rank=1", "is none of drain:"),
        ("admit:step=3", "is none of drain:"),
        ("reshape:to=1|2,step=3", "is none of drain:"),
        ("nonfinite:rank=1,point=after_reduce", "unknown point 'after_reduce'"),
        ("respawn=on", "is no layout, setting or fault"),
    ],
)
def test_a_word_that_means_nothing_is_refused(word: str, why: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=why):
        parse(f"pp2dp2 {word}")


def test_the_faults_of_a_case_are_moved_behind_the_losses_before_it() -> None:
    case = parse("kill:rank=2,losses=0,point=before_reduce kill:rank=0,rejoin=1,point=in_recovery_edit")
    assert (
        case.after(4).faults
        == parse("kill:rank=2,losses=4,point=before_reduce kill:rank=0,rejoin=5,point=in_recovery_edit").faults
    )
    assert str(case.after(0)).split()[1].startswith("kill:rank=2,losses=0,wait=1")
