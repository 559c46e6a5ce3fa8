"""At every dropout site of Megatron's own GPT, masks do not depend on how the batch is split or who computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.elastic.config import ConfigError
from megatron.elastic.mcore.model.dropout import unkeyed_line
from tests.unit.own_process import result_of

SCRIPT = Path(__file__).with_name("gpt_masks.py")
SAME = [
    "alone",
    "ragged",
    "recompute full",
    "recompute selective",
    "tp2",
    "tp2 sp",
    "tp2 sp ragged recompute",
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {answer["case"]["name"]: answer for answer in result_of(SCRIPT, tmp_path_factory.mktemp("gpt"))}


def apart(one: list[float], other: list[float]) -> float:
    """Largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", SAME)
def test_loss_and_gradients_are_those_of_the_whole_batch(answers, name):
    whole, split = answers["whole"], answers[name]
    assert apart(split["losses"], whole["losses"]) < 1e-6  # slices placed at 0 move it by 9e-4 and more
    assert apart(split["grads"], whole["grads"]) < 2e-6


def test_recomputation_changes_no_bit(answers):
    for name in ("recompute full", "recompute selective"):
        assert answers[name]["losses"] == answers["whole"]["losses"]
        assert answers[name]["grads"] == answers["whole"]["grads"]


def test_dropout_was_active_and_differs_from_step_to_step(answers):
    for name in ("next step", "without dropout"):
        assert apart(answers[name]["losses"], answers["whole"]["losses"]) > 1e-3


def test_dropout_inside_a_vendors_kernel_is_told_in_a_line_and_refused_in_exact_mode(answers):
    """Its masks depend on the rank that computes, so a loss changes them."""
    unkeyed = answers["fused"]["unkeyed"]
    assert unkeyed == ["layer 1: FusedAttention", "layer 3: FusedAttention"]
    assert "layer 1: FusedAttention and 1 more" in unkeyed_line(unkeyed, exact=False)
    with pytest.raises(ConfigError, match=r"--elastic-exact: .*layer 1: FusedAttention.*--attention-dropout 0"):
        unkeyed_line(unkeyed, exact=True)
    assert answers["fused, without dropout"]["unkeyed"] == []
    assert unkeyed_line([], exact=True) == ""


@pytest.mark.parametrize("name", ["two", "one", "one again"])
def test_no_mask_is_drawn_twice_where_tokens_are_looked_up_again_or_a_layer_predicts_several(answers, name):
    """``two``: each further token has a layer of its own; ``one``: one layer predicts all, also recomputed."""
    drawn = answers[f"further tokens, {name}"]
    forward = [tuple(key) for key in drawn["forward"]]
    assert len(forward) == len(set(forward)) == 3 + 4 * 3  # three embeddings, and three sites of each of four passes
    assert {tuple(key) for key in drawn["backward"]} == set(forward), "backward draws the same masks"
