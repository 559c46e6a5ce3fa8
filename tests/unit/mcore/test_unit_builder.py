"""A unit that is built anew has the parameters that Megatron gave the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.elastic.mcore.model import unit_builder
from tests.unit.own_process import result_of

SCRIPT = Path(__file__).with_name("built_units.py")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = result_of(SCRIPT, tmp_path_factory.mktemp("units"))
    return found


@pytest.mark.parametrize("tensor", [1, 2])
def test_names_shapes_types_and_cuts_are_megatrons(answers: dict[str, Any], tensor: int) -> None:
    ranks = answers[str(tensor)]
    assert len(ranks) == tensor
    for answer in ranks:
        assert answer["built"] == answer["megatron"] and len(answer["built"]) > 10
        assert {cut for _, _, cut in answer["built"].values()} == {True, False}, "attributes of both kinds are compared"


@pytest.mark.parametrize("tensor", [1, 2])
def test_each_module_is_made_ready_in_the_mode_that_was_asked_for(answers: dict[str, Any], tensor: int) -> None:
    for answer in answers[str(tensor)]:
        assert answer["told"], "the one that keys dropout is told of each module"
        assert answer["training"] == {path: path != "embedding" for path in answer["training"]}


@pytest.mark.parametrize(("path", "layers"), [("decoder.layers.0", 1), ("mtp", 2)])
def test_another_crew_takes_new_experts_and_nothing_else(answers: dict[str, Any], path: str, layers: int) -> None:
    found = answers["redealt"][f"{path}, fewer"]
    assert found["experts"] == [[2] * layers, [4] * layers], "those of the launch have all of their own"
    assert found["indices"] == [[0, 3]] * layers
    assert found["kept"] == [name for name in found["all"] if ".experts." not in name]
    assert found["told"] == ["SequentialMLP"] * layers


@pytest.mark.parametrize("path", ["decoder.layers.0", "mtp"])
def test_another_crew_keeps_as_many_experts(answers: dict[str, Any], path: str) -> None:
    found = answers["redealt"][f"{path}, as many"]
    assert found["kept"] == found["all"] and found["told"] == []


def test_what_others_use_is_the_builder_its_site_and_its_modules() -> None:
    assert unit_builder.__all__ == ["BuildSite", "Modules", "UnitBuilder", "copy_with"]
