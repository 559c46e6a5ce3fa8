"""A flag that this release of Megatron ignores is named in one line."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron.elastic.mcore.args import without_effect
from megatron.elastic.mcore.args.without_effect import ignored_flags


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
