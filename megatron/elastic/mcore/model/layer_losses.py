"""Losses that layers add to the model's own: those that balance experts, the router's z-loss, those of further tokens.

Such a loss is a function of a micro-batch at one layer, whatever stage that layer is in. Megatron attaches its gradient
to the layer's activations, times one weight for the process (``MoEAuxLossAutoScaler``, ``MTPLossAutoScaler``), and
sums its value in a global table, which collectives add up before a log line. Here the weight is that of the step's
loss (docs/design.md §7.2), and the values go through the vote, as the model's loss does. So they are those of the
committed step, and no collective outside the step needs every rank.

With ``--moe-per-layer-logging`` the value of each layer goes through the vote too, under a name of its own. The log
line has their mean alone, and :meth:`LayerLosses.apart` keeps the others for Megatron's writers.

Invariant: values are counted once. Megatron passes them in forwards that record gradients, so a layer that is
recomputed counts when it is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron.elastic.mcore.patching.patches import Patch, bound

__all__ = ["LayerLosses"]

_BY_LAYER = "moe/"
"""Begin of the name of a layer's own value, as Megatron's writers have it."""


@dataclass
class _Sum:
    total: torch.Tensor
    """On the layers' device, so that nothing waits for them before the end of the pass."""
    count: int = 0
    parts: bool = False
    """True if each rank of the cell has a part of the value; otherwise each has the value of its tokens."""


@dataclass
class LayerLosses:
    """The losses of this process's layers since :meth:`weigh`."""

    by_layer: Callable[[], bool] = lambda: False
    """Returns whether each layer's value is wanted too."""
    _sums: dict[str, _Sum] = field(default_factory=dict)
    _committed: dict[str, float] = field(default_factory=dict)
    """The values by layer of the newest committed step."""

    def patches(self) -> tuple[Patch, ...]:
        """Return the rows of the patch table. Megatron 0.18 has a class for the table of values."""
        moe, why = "megatron.core.transformer.moe.", "losses of layers are added up in the vote, with that of the model"
        tracker = moe + "moe_logging.MoEMetricsTracker."
        further = "megatron.core.transformer.multi_token_prediction.MTPLossLoggingHelper."
        return (
            Patch(moe + "moe_utils.save_to_aux_losses_tracker", why, self._save, versions="<0.18"),
            Patch(moe + "moe_utils.track_moe_metrics", why, self._report, versions="<0.18"),
            Patch(tracker + "record", why, self._record, versions=">=0.18"),
            Patch(tracker + "report", why, self._report, versions=">=0.18"),
            Patch(further + "save_loss_to_tracker", why, self._save_further, versions="<0.19"),
            Patch(further + "save_metrics_to_tracker", why, self._save_further, versions=">=0.19"),
            Patch(further + "track_mtp_metrics", why, _reporting_nothing),
        )

    def weigh(self, weight: float, device: torch.device, fewer_tokens: float = 1.0) -> None:
        """Multiply gradients of these losses by ``weight`` from now on, and forget the values.

        ``fewer_tokens``: how many times fewer tokens of a micro-batch a rank has than at launch. Under a loss per token
        Megatron multiplies the losses of routers by the tokens of one rank.
        """
        self._sums.clear()
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([weight * fewer_tokens], device=device))
        MTPLossAutoScaler.set_loss_scale(torch.tensor([weight], device=device))

    def take(self, groups: Sequence[dist.ProcessGroup]) -> Mapping[str, tuple[float, float]]:
        """Return name → (sum, number of values) over the ranks of a cell; collective in its ``groups``, one by one."""
        sums, self._sums = dict(sorted(self._sums.items())), {}
        if not sums:
            return {}
        totals = torch.stack([item.total for item in sums.values()])
        for group in groups:
            dist.all_reduce(totals, group=group)
        ranks = math.prod(group.size() for group in groups)
        return {
            name: (total if item.parts else total / ranks, float(item.count))
            for (name, item), total in zip(sums.items(), totals.tolist(), strict=True)
        }

    def apart(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Return a committed step's losses without the values by layer, which are kept for Megatron's writers."""
        self._committed = {name: value for name, value in losses.items() if name.startswith(_BY_LAYER)}
        return {name: value for name, value in losses.items() if name not in self._committed}

    def _save(self, original: Callable[..., None]) -> Callable[..., None]:
        def save(*args: Any, **kwargs: Any) -> None:
            call = bound(original, args, kwargs)
            self._add_of_layer(call["name"], call["layer_number"], call["loss"], call["reduce_group"])

        return save

    def _record(self, original: Callable[..., None]) -> Callable[..., None]:
        def record(*args: Any, **kwargs: Any) -> None:
            call = bound(original, args, kwargs)
            self._add_of_layer(call["name"], call["layer_number"], call["value"], call["reduce_group"])

        return record

    def _report(self, original: Callable[..., Any]) -> Callable[..., str]:
        def report(*args: Any, **kwargs: Any) -> str:
            """Write values by layer; return no text: the log line has the means with the losses of the step."""
            call = bound(original, args, kwargs)
            if call["writer"] is not None:
                for name, value in self._committed.items():
                    call["writer"].add_scalar(name, value, call["iteration"])
            if call["wandb_writer"] is not None and self._committed:
                call["wandb_writer"].log(self._committed, call["iteration"])
            return ""

        return report

    def _add_of_layer(self, name: str, layer: int, loss: torch.Tensor, summed_over: dist.ProcessGroup | None) -> None:
        self._add(name, loss, summed_over)
        if self.by_layer():
            self._add(f"{_BY_LAYER}{name}_layer_{layer - 1}", loss, summed_over)

    def _save_further(self, original: Callable[..., None]) -> Callable[..., None]:
        def save(*args: Any, **kwargs: Any) -> None:
            call = bound(original, args, kwargs)
            self._add(f"mtp_{call['layer_number'] + 1} loss", call["loss"], None)

        return save

    def _add(self, name: str, loss: torch.Tensor, summed_over: dist.ProcessGroup | None) -> None:
        value = loss.detach().double().reshape(())
        item = self._sums.setdefault(name, _Sum(torch.zeros_like(value), parts=summed_over is not None))
        item.total += value
        item.count += 1


def _reporting_nothing(original: Callable[..., Any]) -> Callable[..., str]:
    def report(*args: Any, **kwargs: Any) -> str:
        """Return no text: the log line has these values with the losses of the step."""
        return ""

    return report
