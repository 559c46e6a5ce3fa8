"""Flat parameter and gradient storage of the units this process holds.

Each (unit, shard) that this process holds, the common part included, has one flat
parameter tensor (model type) and one flat fp32 gradient tensor in the element order of
its :class:`UnitLayout`. They are adjacent in one arena, in the order of shard and unit, so
one call can reduce or gather those with the same holders. Parameters
become views of the arena: writing a block of the flat tensor writes the model.

Invariant: ``arena.gradients`` is the only place gradients accumulate, in fp32,
unscaled by anything but the loss scale; ``param.grad`` is ``None`` between
backward passes of non-fp32 parameters.

The held units can change between steps (:meth:`Arena.hold`): the arena is laid out
anew and parameters of units that stay are copied. Both layouts exist meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.elastic.engine.compute.model_interface import ModelInterface, UnitParameter
from megatron.elastic.state.layout import ParamSlot, StateBlock, UnitLayout, UnitShard

__all__ = ["Arena", "UnitSlice"]


@dataclass(frozen=True)
class UnitSlice:
    """The elements ``[start, start + layout.numel)`` of the arena that a (unit, shard) takes."""

    start: int
    layout: UnitLayout

    @property
    def stop(self) -> int:
        """End (exclusive) of the (unit, shard) in the arena."""
        return self.start + self.layout.numel


class Arena:
    """Storage for all held units (module docstring).

    Raises ``ValueError`` when the parameters are of more than one type.
    """

    def __init__(self, interface: ModelInterface, layouts: Mapping[UnitShard, UnitLayout]) -> None:
        """``layouts``: layouts of every unit that this process may hold, for its shard and the common part."""
        self._interface = interface
        self._layouts = layouts
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._views: dict[int, list[torch.Tensor]] = {}
        self._view_of: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._slots: dict[tuple[int, str], tuple[UnitSlice, ParamSlot]] = {}
        """(unit, parameter's name) → where it lies."""
        self.units: tuple[int, ...] = ()
        """The held units, ascending."""
        self.slices: dict[UnitShard, UnitSlice] = {}
        """The flat spaces of the held units, in the order of the arena."""
        self.spare: tuple[torch.Tensor, torch.Tensor] | None = None
        """Storage prepared for other units (parameters, gradients; zeros)."""
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.parameters = self.gradients = torch.empty(0)
        self._lay()

    def prepare(self, units: Collection[int]) -> None:
        """Prepare storage and modules for exactly ``units``, for :meth:`hold`. On any thread, beside a step.

        On a CPU this saves most of the time of :meth:`hold`, since the kernel allocates pages at the first touch.
        """
        if self.device.type == "cpu" and tuple(sorted(units)) != self.units:
            self._interface.prepare(units)
            length = sum(self._layouts[key].numel for key in self._spaces(units))
            made = torch.empty(length, dtype=self.dtype), torch.empty(length, dtype=torch.float32)
            self.spare = made[0].zero_(), made[1].zero_()

    def hold(self, units: Collection[int]) -> bool:
        """Hold exactly ``units``. Returns whether the units changed: parameters of new units are then undefined."""
        if tuple(sorted(units)) == self.units:
            return False
        self.release()
        before = frozenset(self.units)
        for unit in self.units:
            for item in self._interface.unit_parameters(unit):
                item.parameter.grad = None
        self._views, self._view_of, self.gradients = {}, {}, self.gradients.new_empty(0)
        self._interface.hold(units)
        self._lay(before)
        return True

    def _lay(self, known: Collection[int] | None = None) -> None:
        """Lay out storage for the units of the model interface. Only units ``known`` (None: all) keep their values."""
        self.units, self.slices, start = self._interface.held_units(), {}, 0
        for key in self._spaces(self.units):
            self.slices[key] = UnitSlice(start, self._layouts[key])
            start += self._layouts[key].numel
        self._slots = {
            (unit, slot.spec.name): (where, slot)
            for (unit, _), where in self.slices.items()
            for slot in where.layout.slots
        }
        members = {unit: tuple(self._interface.unit_parameters(unit)) for unit in self.units}
        self.dtype, self.device = _common_type(members) or (self.dtype, self.device)
        spare, self.spare = self.spare, None
        if spare is None or spare[0].numel() != start or spare[0].dtype != self.dtype:
            spare = (
                torch.zeros(start, dtype=self.dtype, device=self.device),
                torch.zeros(start, dtype=torch.float32, device=self.device),
            )
        self.parameters, self.gradients = spare
        self._views = {
            unit: [self._adopt(unit, item, known is None or unit in known) for item in items]
            for unit, items in members.items()
        }
        self._view_of = {
            item.parameter: view
            for unit, items in members.items()
            for item, view in zip(items, self._views[unit], strict=True)
        }

    def _spaces(self, units: Collection[int]) -> list[UnitShard]:
        """Return the flat spaces of ``units``, in the order of the arena."""
        return sorted((key for key in self._layouts if key[0] in units), key=lambda key: (key[1], key[0]))

    def place_of(self, unit: int, name: str) -> tuple[int, int]:
        """Return the elements ``[start, stop)`` of the arena that a parameter of a held unit takes."""
        where, slot = self._slots[unit, name]
        return where.start + slot.start, where.start + slot.stop

    def _adopt(self, unit: int, item: UnitParameter, keep: bool) -> torch.Tensor:
        """Move one parameter's storage into the arena, its value too (``keep``); returns its fp32 gradient view."""
        start, stop = self.place_of(unit, item.spec.name)
        value = self.parameters[start:stop].view(item.spec.shape)
        gradient = self.gradients[start:stop].view(item.spec.shape)
        with torch.no_grad():
            if keep and item.parameter.numel():  # else its storage was freed earlier
                value.copy_(item.parameter)
            item.parameter.data = value
        if self.dtype == torch.float32:
            item.parameter.grad = gradient
        else:
            self._hooks.append(item.parameter.register_post_accumulate_grad_hook(_accumulate_into(gradient)))
        return gradient

    def zero_gradients(self) -> None:
        """Zero all gradients before a step, and attach fp32 views again that a ``zero_grad`` call dropped."""
        self.gradients.zero_()
        if self.dtype == torch.float32:
            for unit, views in self._views.items():
                for item, view in zip(self._interface.unit_parameters(unit), views, strict=True):
                    item.parameter.grad = view

    def accumulate(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Add a gradient that was computed outside of autograd, as autograd adds its own."""
        self._view_of[parameter].add_(gradient)

    def gradient_views(self) -> Mapping[int, Sequence[torch.Tensor]]:
        """Return the fp32 gradient of each parameter, in its shape, per unit."""
        return self._views

    def block_parameters(self, block: StateBlock) -> torch.Tensor:
        """Return the parameters of a block: 1-D, model type, a view."""
        start = self.slices[block.key[:2]].start
        return self.parameters[start + block.start : start + block.stop]

    def block_gradients(self, block: StateBlock) -> torch.Tensor:
        """Return the fp32 gradients of a block: 1-D, a view."""
        start = self.slices[block.key[:2]].start
        return self.gradients[start + block.start : start + block.stop]

    def release(self) -> None:
        """Detach from the model (hooks removed; parameters keep their storage)."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _common_type(members: Mapping[int, Sequence[UnitParameter]]) -> tuple[torch.dtype, torch.device] | None:
    kinds = {(item.parameter.dtype, item.parameter.device) for items in members.values() for item in items}
    if len(kinds) > 1:
        raise ValueError(f"parameters of one rank must share a type and a device, found {sorted(map(str, kinds))}")
    return kinds.pop() if kinds else None


def _accumulate_into(gradient: torch.Tensor):  # type: ignore[no-untyped-def]
    def hook(parameter: torch.nn.Parameter) -> None:
        if parameter.grad is not None:
            gradient.add_(parameter.grad)
            parameter.grad = None

    return hook
