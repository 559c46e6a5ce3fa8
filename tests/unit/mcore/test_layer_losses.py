"""Losses that layers add are summed once each, over the ranks of a cell, and weighed as the step's loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

from megatron.elastic.mcore.model.layer_losses import LayerLosses
from megatron.elastic.mcore.parallel_state.stage import GroupStandIn

CPU = torch.device("cpu")
GROUP = object()


def saving(losses: LayerLosses, name: str, value: float, layer: int, group: object = None) -> None:
    """What Megatron's router does in a forward."""
    make = losses.patches()[0].make
    make(moe_utils.save_to_aux_losses_tracker)(name, torch.tensor(value), layer, 4, reduce_group=group)


def test_values_of_layers_and_micro_batches_are_added_up_and_counted() -> None:
    losses = LayerLosses()
    for layer, value in ((1, 1.0), (2, 2.0), (1, 4.0)):
        saving(losses, "load_balancing_loss", value, layer)
    saving(losses, "z_loss", 0.5, 1)
    assert losses.take(()) == {"load_balancing_loss": (7.0, 3.0), "z_loss": (0.5, 1.0)}
    assert losses.take(()) == {}, "each value counts once"


def test_what_an_abandoned_pass_left_does_not_count() -> None:
    losses = LayerLosses()
    saving(losses, "z_loss", 0.5, 1)
    losses.weigh(1.0, CPU)
    saving(losses, "z_loss", 0.25, 1)
    assert losses.take(()) == {"z_loss": (0.25, 1.0)}


def test_parts_of_a_value_are_added_over_the_cell_and_values_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here six ranks with the same numbers: two parts of the sequence, of three tensor-parallel ranks each."""
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: values.mul_(group.size()))
    losses = LayerLosses()
    saving(losses, "load_balancing_loss", 0.25, 1, GROUP)
    saving(losses, "z_loss", 0.5, 1)
    groups: list[Any] = [GroupStandIn(0, 3), GroupStandIn(0, 2)]
    assert losses.take(groups) == {"load_balancing_loss": (1.5, 1.0), "z_loss": (0.5, 1.0)}


def test_a_gradient_has_the_weight_of_the_step() -> None:
    losses = LayerLosses()
    for weight in (0.25, 8.0):
        losses.weigh(weight, CPU)
        activation, loss = torch.ones(2, requires_grad=True), torch.ones((), requires_grad=True)
        MoEAuxLossAutoScaler.apply(activation, loss).sum().backward()
        assert loss.grad is not None and loss.grad.item() == weight


def test_values_by_layer_go_to_the_writer_and_not_into_the_log_line() -> None:
    losses, written = LayerLosses(lambda: True), list[tuple[str, float, int]]()
    for layer, value in ((1, 1.0), (3, 2.0), (1, 4.0)):
        saving(losses, "z_loss", value, layer)
    found = losses.take([])
    assert found == {"z_loss": (7.0, 3.0), "moe/z_loss_layer_0": (5.0, 2.0), "moe/z_loss_layer_2": (2.0, 1.0)}
    means = {name: total / count for name, (total, count) in found.items()}
    assert losses.apart({"lm loss": 3.0, **means}) == {"lm loss": 3.0, "z_loss": 7.0 / 3}
    report = losses.patches()[1].make(moe_utils.track_moe_metrics)
    writer = SimpleNamespace(add_scalar=lambda *line: written.append(line))
    assert report(1.0, 9, writer=writer) == ""
    assert written == [("moe/z_loss_layer_0", 2.5, 9), ("moe/z_loss_layer_2", 2.0, 9)]
