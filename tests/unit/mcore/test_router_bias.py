"""A router chooses by the bias that it is given, and its tokens are counted by unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.elastic.mcore.model import router_bias
from tests.unit.own_process import result_of

SCRIPT = Path(__file__).with_name("router_buffers.py")
TYPES = ("torch.float32", "torch.bfloat16")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = result_of(SCRIPT, tmp_path_factory.mktemp("routers"))
    return found


def test_all_that_it_exports_is_tried_here() -> None:
    assert router_bias.__all__ == ["counted_tokens", "forget_tokens", "present_bias", "set_bias"]


@pytest.mark.parametrize("dtype", TYPES)
def test_tokens_go_where_the_bias_is_largest(answers: dict[str, Any], dtype: str) -> None:
    """Six tokens, two experts each; a score lies between 0 and 1, the bias differs by 8."""
    behind = str(answers[dtype]["behind"])
    assert answers[dtype]["counted"] == {"2": [6, 6, 0, 0], "5": [0, 0, 6, 6], behind: [0, 6, 6, 0]}
    assert answers[dtype]["forgotten"] == {"2": [0] * 4, "5": [0] * 4, behind: [0] * 4}


@pytest.mark.parametrize("dtype", TYPES)
def test_the_bias_is_read_back_in_full_precision(answers: dict[str, Any], dtype: str) -> None:
    behind = str(answers[dtype]["behind"])
    expected = {"2": [9.0, 8.0, 0.0, 0.0], "5": [0.0, 0.0, 8.0, 9.0], behind: [0.0, 9.0, 8.0, 0.0]}
    assert answers[dtype]["bias"] == expected
    assert answers[dtype]["types"] == ["torch.float32"] * 2


@pytest.mark.parametrize("dtype", TYPES)
def test_a_buffer_that_a_checkpoint_may_hold_is_not_written(answers: dict[str, Any], dtype: str) -> None:
    assert answers[dtype]["written"] == [0.0] * 4
