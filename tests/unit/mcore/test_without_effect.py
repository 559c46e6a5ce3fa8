"""A flag that this release of Megatron ignores is named in one line."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron.elastic.config import ElasticConfig
from megatron.elastic.mcore.args import without_effect
from megatron.elastic.mcore.args.support import check
from megatron.elastic.mcore.args.without_effect import ignored_flags
from tests.unit.mcore.arguments_of_a_run import plain


def lines(patch: pytest.MonkeyPatch, version: str, optimizer: str, *words: str) -> list[str]:
    patch.setattr(without_effect, "installed_version", lambda: version)
    return list(ignored_flags(Namespace(optimizer=optimizer), words))


def test_coefficients_of_lion(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--lion-beta1=0.95", "--adam-beta2", "0.98")
    (line,) = lines(monkeypatch, "0.19.2", "lion", *words)
    assert line.startswith("--lion-beta1 has no effect") and "--adam-beta1" in line
    assert lines(monkeypatch, "0.19.2", "adam", *words) == []


def test_a_ramp_up(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--rampup-batch-size", "4", "4", "24")
    (line,) = lines(monkeypatch, "0.18.2", "adam", *words)
    assert line.startswith("--rampup-batch-size has no effect") and "--step-batch-size-schedule" in line
    assert lines(monkeypatch, "0.17.1", "adam", *words) == [] == lines(monkeypatch, "0.19.2", "adam")


def given(elastic: bool, *words: str, **more: object) -> tuple[str, ...]:
    return check(plain(elastic=elastic, **more), ElasticConfig(), "cpu", words)


@pytest.mark.parametrize("elastic", [False, True])
def test_flags_of_other_models_are_named_in_one_line(elastic: bool) -> None:
    words = ("--micro-batch-size", "2", "--img-h=30", "--no-inference-wandb-logging", "--bert-load", "there")
    assert given(elastic, *words) == (
        "no effect on the pretraining of a GPT: --bert-load, --img-h, --no-inference-wandb-logging",
    )
    assert given(elastic, "--no-scatter-gather-tensors-in-pipeline") != ()
    assert given(elastic, "--lr", "1") == ()


def test_flags_of_reinforcement_learning_have_an_effect_where_it_trains() -> None:
    words = ("--grpo-iterations", "2")
    assert given(False, *words) == ("no effect on the pretraining of a GPT: --grpo-iterations",)
    assert given(False, *words, perform_rl_step=True) == ()
    assert given(False, *words, "--img-h", "1", perform_rl_step=True) == (
        "no effect on the pretraining of a GPT: --img-h",
    )
