"""Any script of a few kills, in any order of events: the run ends as the undisturbed one, with one history in its logs.

A failing example is shrunk to the fewest and earliest kills, and printed as the command that runs it.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron.elastic.engine.inject import KILL_POINTS
from tests.cluster.history import ELSEWHERE, run_and_judge

RANKS, STEPS = 4, 4
POINTS = [point for point in KILL_POINTS if point not in ELSEWHERE]


@st.composite
def kills(draw: st.DrawFn) -> str:
    """One line of a script, for the first life of a rank, or for its second.

    The first life is ended in a step: a loss before the first one starts all ranks anew, which the launcher does.
    """
    rank, point, life = draw(st.integers(0, RANKS - 1)), draw(st.sampled_from(POINTS)), draw(st.integers(0, 1))
    step = draw(st.integers(0 if life else 1, STEPS))
    where = f",step={step}" if step else ""
    return f"kill:rank={rank},point={point}{where},incarnation={life}"


def scripts(most: int) -> st.SearchStrategy[str]:
    """Up to ``most`` kills."""
    return st.lists(kills(), min_size=1, max_size=most).map(" ".join)


def survives(script: str, seed: int, back: float, mirrors: int, heavy: bool = False) -> None:
    layers = "heavy=on" if heavy else "heavy=off"
    run_and_judge(f"steps={STEPS} seed={seed} back={back} {layers} mirrors={mirrors} migrate_after=1 {script}")


SEEDS, DELAYS = st.integers(0, 10_000), st.sampled_from([0.01, 0.05, 0.3])
QUICK = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
LONG = settings(QUICK, max_examples=1000)


@QUICK
@given(scripts(most=2), SEEDS, DELAYS)
def test_two_kills_with_two_mirrors(script: str, seed: int, back: float) -> None:
    survives(script, seed, back, mirrors=2)


@QUICK
@given(scripts(most=3), SEEDS, DELAYS)
def test_three_kills_with_three_mirrors_while_layers_move(script: str, seed: int, back: float) -> None:
    survives(script, seed, back, mirrors=3, heavy=True)


@pytest.mark.slow
@LONG
@given(scripts(most=3), SEEDS, DELAYS, st.booleans())
def test_many_scripts(script: str, seed: int, back: float, heavy: bool) -> None:
    survives(script, seed, back, mirrors=3, heavy=heavy)
