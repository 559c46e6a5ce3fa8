"""A backward in two parts gives every gradient of Megatron's GPT the bits of the whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.own_process import result_of

SCRIPT = Path(__file__).with_name("split_gpt.py")
LAYERS, LINEARS = 3, 4
CASES = (
    "plain",
    "tied",
    "no bias, gated",
    "recompute full",
    "recompute selective",
    "bf16",
    "tp2",
    "tp2 sp",
    "tp2 sp tied recompute",
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return result_of(SCRIPT, tmp_path_factory.mktemp("gpt"))


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_has_the_bits_of_the_whole_backward(answers, name):
    for rank in answers[name]:
        assert rank["split"] == rank["whole"]
        assert rank["installed"] == rank["whole"]


@pytest.mark.parametrize("name", CASES)
def test_the_weights_of_all_linear_layers_were_deferred(answers, name):
    """The head too, but where its weight is the embedding's and one piece passes both."""
    expected = LAYERS * LINEARS + ("tied" not in name)
    for rank in answers[name]:
        assert rank["sizes"] == [expected] * 4
