"""Checkpoints hold for Muon and Lion the state that the package's own optimizers write and read."""

from __future__ import annotations

import importlib
import typing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typing_extensions
from megatron.core.optimizer.optimizer_config import AdamOptimizerConfig

from megatron.elastic.mcore.checkpoint.momentum_state import (
    LION,
    MUON_MOMENTUM,
    MomentumState,
    lion_settings,
    muon_settings,
)
from megatron.elastic.mcore.checkpoint.state_dict import with_empty_groups
from tests.emerging import unpacked


def package(folder: Path, patch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Return a module of emerging-optimizers, unpacked into ``folder``."""
    patch.setattr(typing, "override", typing_extensions.override, raising=False)
    patch.syspath_prepend(str(unpacked(folder)))
    return importlib.import_module(f"emerging_optimizers.{name}")


def begun(names: tuple[str, ...], settings: dict[str, Any], weight: torch.nn.Parameter) -> MomentumState:
    """Return a state whose momentum is 2."""
    (name,) = names
    state = MomentumState(name, settings, [{"params": [weight], "wd_mult": 1.0}])
    state.begin()
    state.state[weight][name].fill_(2.0)
    return state


def test_the_package_resumes_muon_from_our_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs_from = package(tmp_path, monkeypatch, "orthogonalized_optimizers")
    weight = torch.nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    config = AdamOptimizerConfig(optimizer="muon", lr=0.5, weight_decay=0.25, muon_momentum=0.75)
    state = begun(MUON_MOMENTUM, muon_settings(config), weight)
    theirs = theirs_from.Muon([{"params": [weight], "wd_mult": 1.0}], lr=1.0, momentum=0.1, weight_decay=0.0)
    theirs.load_state_dict(state.state_dict())
    weight.grad = torch.zeros_like(weight)
    theirs.step()
    group = theirs.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.5, 0.75, 0.25)
    assert torch.equal(theirs.state[weight]["momentum_buffer"], torch.full((6, 4), 1.5))
    assert theirs.state_dict()["param_groups"] == state.state_dict()["param_groups"]


def test_the_package_resumes_lion_from_our_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs_from = package(tmp_path, monkeypatch, "scalar_optimizers.lion")
    monkeypatch.setattr(theirs_from, "calculate_lion_update", uncompiled(theirs_from.calculate_lion_update))
    weight = torch.nn.Parameter(torch.ones(6))
    config = SimpleNamespace(lr=0.5, weight_decay=0.25, adam_beta1=0.75, adam_beta2=0.5)
    state = begun(LION, lion_settings(config), weight)
    theirs = theirs_from.Lion([{"params": [weight], "wd_mult": 1.0}], lr=1.0, betas=(0.0, 0.0), weight_decay=0.0)
    theirs.load_state_dict(state.state_dict())
    weight.grad = torch.full_like(weight, -8.0)
    theirs.step()
    assert theirs.param_groups[0]["betas"] == (0.75, 0.5)
    assert torch.equal(theirs.state[weight]["exp_avg"], torch.full((6,), -3.0))
    assert torch.equal(weight.detach(), torch.full((6,), 1 - 0.125 + 0.5)), "0.75 · 2 - 0.25 · 8 is below zero"
    assert theirs.state_dict()["param_groups"] == state.state_dict()["param_groups"]


def uncompiled(function: Any) -> Any:
    """Return what ``torch.compile`` was given, which needs no compiler."""
    return function._torchdynamo_orig_callable


@pytest.mark.parametrize(("names", "settings"), [(LION, lion_settings), (MUON_MOMENTUM, muon_settings)])
def test_it_does_not_step(names: tuple[str, ...], settings: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    config = SimpleNamespace(lr=0.1, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.9, muon_momentum=0.9)
    with pytest.raises(NotImplementedError):
        begun(names, settings(config), weight).step()


def test_masters_are_read_into_their_own_groups_where_a_stage_has_an_empty_one() -> None:
    assert with_empty_groups([["norm"]], [[], ["a"]]) == [[], ["norm"]]
    assert with_empty_groups([["matrix"], ["norm"]], [["a"], ["b"]]) == [["matrix"], ["norm"]]
    assert with_empty_groups([[], ["norm"]], [[], ["a"]]) == [[], ["norm"]]
