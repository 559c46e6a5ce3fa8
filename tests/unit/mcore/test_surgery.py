"""Units of Megatron's own GPT change place between cells: losses and gradients stay those of the launch's cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.own_process import result_of

SCRIPT = Path(__file__).with_name("recut_pipeline.py")
NAMES = (
    "tied",
    "untied, recomputed",
    "bf16",
    "tp2",
    "tp2, sequence parallel, untied",
    "interleaved",
    "interleaved, untied, recomputed, bf16",
    "layers of four shapes",
    "layers of four shapes, interleaved, recomputed",
    "two further tokens",
    "a further token, interleaved, bf16",
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[dict[str, Any]]]]:
    return {answer["case"]["name"]: answer["ranks"] for answer in result_of(SCRIPT, tmp_path_factory.mktemp("recut"))}


def runs(rank: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The run at launch, and those after units changed place."""
    first, *rest = (answer for answer in rank if "loss" in answer)
    assert len(rest) == 7
    return first, rest


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_of_the_launch(answers: Any, name: str) -> None:
    for rank in answers[name]:
        launch, recut = runs(rank)
        for run in recut:
            assert run["loss"] == pytest.approx(launch["loss"], rel=1e-6), run["cut"]
            assert run["grads"].keys() == launch["grads"].keys()
            for unit, gradient in launch["grads"].items():
                if unit == "0" and not gradient:
                    continue  # all that the embedding has is the weight that both ends use
                largest = max(map(abs, gradient))
                assert largest > 0, f"unit {unit} has no gradient at all"
                bound = largest * (2e-2 if "bf16" in name else 2e-6)
                apart = max(abs(a - b) for a, b in zip(gradient, run["grads"][unit], strict=True))
                assert apart <= bound, f"{run['cut']}: unit {unit} differs by {apart / largest:.1e} of its largest"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_given_up_is_freed(answers: Any, name: str) -> None:
    """All cells together keep one copy of the model alive (and of a tied weight one at each end)."""
    for rank in answers[name]:
        launch, recut = runs(rank)
        by_cut = {run["cut"]: run["bytes"] for run in recut}
        whole = by_cut["(0, 6)"]
        assert whole[1] == 0, "a cell without units holds no parameters"
        assert sum(whole) <= sum(launch["bytes"])
        assert by_cut["launch again"] == launch["bytes"], "back at the launch's cut, memory is the launch's"
        for sizes in by_cut.values():
            assert sum(sizes) <= sum(launch["bytes"])


@pytest.mark.parametrize("name", NAMES)
def test_building_units_draws_no_random_number(answers: Any, name: str) -> None:
    assert all(answer["same"] for rank in answers[name] for answer in rank if "same" in answer)
