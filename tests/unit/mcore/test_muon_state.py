"""What a checkpoint says of Muon is what the package's own optimizer writes, and reads."""

from __future__ import annotations

import importlib
import typing
from pathlib import Path

import pytest
import torch
import typing_extensions
from megatron.core.optimizer.optimizer_config import AdamOptimizerConfig

from megatron.elastic.mcore.checkpoint.muon_state import MOMENTUM, MuonState
from megatron.elastic.mcore.checkpoint.state_dict import with_empty_groups
from tests.emerging import unpacked


def test_the_package_resumes_from_our_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typing, "override", typing_extensions.override, raising=False)
    monkeypatch.syspath_prepend(str(unpacked(tmp_path)))
    package = importlib.import_module("emerging_optimizers.orthogonalized_optimizers")
    weight = torch.nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    config = AdamOptimizerConfig(optimizer="muon", lr=0.5, weight_decay=0.25, muon_momentum=0.75)
    state = MuonState(config, [{"params": [weight], "wd_mult": 1.0}])
    state.begin()
    state.state[weight][MOMENTUM].fill_(2.0)
    theirs = package.Muon([{"params": [weight], "wd_mult": 1.0}], lr=1.0, momentum=0.1, weight_decay=0.0)
    theirs.load_state_dict(state.state_dict())
    weight.grad = torch.zeros_like(weight)
    theirs.step()
    group = theirs.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.5, 0.75, 0.25)
    assert torch.equal(theirs.state[weight]["momentum_buffer"], torch.full((6, 4), 1.5))
    assert theirs.state_dict()["param_groups"] == state.state_dict()["param_groups"]


def test_it_does_not_step() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(NotImplementedError):
        MuonState(AdamOptimizerConfig(optimizer="muon", lr=0.1), [{"params": [weight]}]).step()


def test_masters_are_read_into_their_own_groups_where_a_stage_has_an_empty_one() -> None:
    assert with_empty_groups([["norm"]], [[], ["a"]]) == [[], ["norm"]]
    assert with_empty_groups([["matrix"], ["norm"]], [["a"], ["b"]]) == [["matrix"], ["norm"]]
    assert with_empty_groups([[], ["norm"]], [[], ["a"]]) == [[], ["norm"]]
