"""Megatron's optimizer parameter groups, formed without a collective.

Megatron gathers the group keys of every rank in the world to agree on an order; a newcomer could not take part in
that collective. Here a group is named by its overrides, and groups are in Megatron's order of these names. The list
has every name that the configuration can produce, so each rank derives the same list from its arguments alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron.elastic.mcore.args.optimizers import OF_MATRICES
from megatron.elastic.state.layout import Matrix

__all__ = ["GroupKey", "GroupKeys", "adopt", "settings_of", "with_width"]

Overrides = tuple[tuple[str, Any], ...]

_SCHEDULED = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Settings that Megatron's scheduler reads from a group before it uses its own value."""


@dataclass(frozen=True)
class GroupKey:
    """One parameter group: its position in the list, and its overrides."""

    index: int
    overrides: Overrides

    @property
    def wd_mult(self) -> float:
        """Multiplier on the scheduled weight decay."""
        return float(dict(self.overrides).get("wd_mult", 1.0))


class GroupKeys:
    """All groups that ``overrides`` (Megatron's ``config_overrides``) can produce.

    ``qkv_parts``: rows of queries, key and value in a group of a fused weight that Muon splits; empty: it does not.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        overrides: Mapping[Any, Mapping[str, Any]] | None,
        qkv_parts: tuple[int, ...] = (),
    ) -> None:
        self._config, self._qkv_parts = config, qkv_parts
        self._overrides = dict(core_optimizer.get_standard_config_overrides(config) if overrides is None else overrides)
        combinations: set[Overrides] = {()}
        for override in self._overrides.values():
            combinations |= {_merged(dict(base), override) for base in combinations}
        self.keys = tuple(GroupKey(i, o) for i, o in enumerate(sorted(combinations)))
        self._by_overrides = {key.overrides: key for key in self.keys}

    def key(self, name: str, parameter: torch.nn.Parameter) -> GroupKey:
        """Return the group of one parameter, by Megatron's own matching rules."""
        merged: Overrides = ()
        for pattern, override in self._overrides.items():
            if pattern.matches(parameter, name):
                merged = _merged(dict(merged), override)
        return self._by_overrides[merged]

    def matrix(self, name: str, parameter: torch.nn.Parameter, shape: Sequence[int]) -> Matrix | None:
        """Return the matrix that Muon or Lion steps, by Megatron's choice; None: another optimizer steps it.

        ``shape``: the parameter's as cut at the launch. Raises ``ValueError`` for a fused weight without such parts.
        """
        embeds = getattr(parameter, "is_embedding_or_output_parameter", False)
        if self._config.optimizer not in OF_MATRICES or embeds or len(shape) != 2:
            return None
        return Matrix(shape[0], shape[1], self._qkv_parts if "linear_qkv.weight" in name else ())

    def epsilons(self) -> tuple[float, ...]:
        """Return Adam's epsilon of each group."""
        return tuple(float(dict(key.overrides).get("eps", self._config.adam_eps)) for key in self.keys)

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups in the form of Megatron's scheduler and checkpoints, without tensors."""
        groups = []
        for key in self.keys:
            overrides = dict(key.overrides)
            groups.append(
                {
                    "params": [],
                    "is_expert_parallel": False,
                    "default_config": not any("lr" in name for name in overrides),
                    "wd_mult": 1.0,
                    "lr_mult": 1.0,
                    "is_decoupled_lr": False,
                    "max_lr": self._config.lr,
                    "min_lr": self._config.min_lr,
                    "lr": self._config.lr,
                    "weight_decay": self._config.weight_decay,
                    **overrides,
                }
            )
        return groups


def with_width(
    overrides: Mapping[Any, Mapping[str, Any]] | None, config: OptimizerConfig, model_config: Any
) -> Mapping[Any, Mapping[str, Any]] | None:
    """Return ``overrides`` with those by which muP scales groups with the width of the model (``--use-mup``)."""
    if not getattr(model_config, "use_mup", False):
        return overrides
    scaled = core_optimizer.get_mup_config_overrides(
        config=config, mup_width_mult=model_config.mup_width_mult, optimizer_type=config.optimizer
    )
    return {**(overrides or {}), **scaled}


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedule settings of a parameter group: numbers by name."""
    return {name: group[name] for name in _SCHEDULED if name in group}


def adopt(groups: Sequence[dict[str, Any]], settings: Sequence[Mapping[str, Any]]) -> None:
    """Set the schedule settings of ``groups`` to ``settings``, one for each group."""
    for group, setting in zip(groups, settings, strict=True):
        group.update(setting)


def _merged(base: dict[str, Any], override: Mapping[str, Any]) -> Overrides:
    return tuple(sorted({**base, **override}.items()))
