"""Flat parameter and gradient storage of the units this process holds.

Each (unit, shard) of which this process computes a part, and the common part of each
unit, has one flat *space*: parameters (model type) and fp32 gradients in the element
order of its :class:`UnitLayout`. Spaces are adjacent in one arena, in the order of shard
and unit, so one call can reduce or gather those with the same holders. A parameter that is
the whole of one shard's becomes a view of its space: writing a block writes the model.

In a cell of another size than at the launch, a parameter may consist of parts of several
shards (:mod:`~megatron.elastic.state.coverage`). It then has *local* storage, behind the
spaces in the arena. :meth:`Arena.spread` adds its gradient to the spaces before they are
reduced; :meth:`Arena.collect` reads its value from them after they are gathered.

Invariant: ``arena.gradients`` is the only place gradients accumulate, in fp32,
unscaled by anything but the loss scale; ``param.grad`` is ``None`` between
backward passes of non-fp32 parameters. After :meth:`Arena.hand_over` gradients are
added up elsewhere, each as soon as autograd has it, and ``param.grad`` is always
``None`` between backward passes.

The held part can change between steps (:meth:`Arena.hold`): the arena is laid out
anew and spaces that stay are copied. Both layouts exist meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron.elastic.engine.compute.model_interface import CellPlace, ModelInterface, UnitParameter
from megatron.elastic.state.coverage import Overlap, add, read
from megatron.elastic.state.layout import ALIGN, ParamSlot, ParamSpec, StateBlock, UnitLayout, UnitShard

__all__ = ["Arena", "HeldPart", "Receiver", "UnitSlice"]

Receiver = Callable[[int, torch.Tensor], None]
"""Takes the gradient of one parameter from one backward pass, with the first element of its place in the arena."""


@dataclass(frozen=True)
class HeldPart:
    """The part of the model that one rank holds in a configuration."""

    units: tuple[int, ...] = ()
    """Ascending."""
    place: CellPlace | None = None
    """The rank's place in its cell; ``None``: it is in no cell, and holds no unit."""
    spaces: tuple[UnitShard, ...] = ()
    """The (unit, shard)s of which it computes a part; some may have no parameters."""


@dataclass(frozen=True)
class UnitSlice:
    """The elements ``[start, start + layout.numel)`` of the arena that the space of a (unit, shard) takes."""

    start: int
    layout: UnitLayout

    @property
    def stop(self) -> int:
        """End (exclusive) of the space in the arena."""
        return self.start + self.layout.numel


@dataclass(frozen=True)
class _Local:
    """A parameter with local storage: elements ``[start, stop)`` of the arena."""

    unit: int
    spec: ParamSpec
    shape: torch.Size
    overlaps: tuple[Overlap, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


class Arena:
    """Storage for all held units (module docstring).

    Raises ``ValueError`` when the parameters are of more than one type.
    """

    def __init__(self, interface: ModelInterface, layouts: Mapping[UnitShard, UnitLayout], held: HeldPart) -> None:
        """``layouts``: layouts of every space that this process may hold; ``held``: the part that the model holds."""
        self._interface = interface
        self.layouts = layouts
        self.built = held
        """The part that the model was built for at the start of this process."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._receiver: Receiver | None = None
        self._views: dict[int, list[torch.Tensor]] = {}
        self._view_of: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._places: dict[tuple[int, str], tuple[int, int]] = {}
        """(unit, parameter's name) → elements of the arena where its gradient accumulates."""
        self._locals: list[_Local] = []
        self.held = HeldPart()
        self.slices: dict[UnitShard, UnitSlice] = {}
        """The spaces, in the order of the arena."""
        self.state_stop = 0
        """End (exclusive) of the spaces in the arena; local storage follows."""
        self.spare: tuple[torch.Tensor, torch.Tensor] | None = None
        """Storage prepared for another part of the model (parameters, gradients; zeros)."""
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.parameters = self.gradients = torch.empty(0)
        self.filled = True
        """False after a change of the held part, until its parameters have been gathered."""
        self._lay(held, initial=True)

    def prepare(self, held: HeldPart) -> None:
        """Prepare storage and modules for exactly ``held``, for :meth:`hold`. On any thread, beside a step.

        On a CPU this saves most of the time of :meth:`hold`, since the kernel allocates pages at the first touch.
        """
        if self.device.type == "cpu" and not self._holds(held):
            self._interface.prepare(held.units, held.place)
            length = self._length(held)
            made = torch.empty(length, dtype=self.dtype), torch.empty(length, dtype=torch.float32)
            self.spare = made[0].zero_(), made[1].zero_()

    def hold(self, held: HeldPart) -> bool:
        """Hold exactly ``held``. Returns whether that is a change: parameters in new spaces are then undefined."""
        if self._holds(held):
            return False
        self.release()
        for unit in self.held.units:
            for item in self._interface.unit_parameters(unit):
                item.parameter.grad = None
        self._views, self._view_of, self.gradients = {}, {}, self.gradients.new_empty(0)
        self._interface.hold(held.units, held.place)
        self._lay(held)
        return True

    def _holds(self, held: HeldPart) -> bool:
        same = held.place == self.held.place or not held.units
        return same and held.units == self.held.units

    def _lay(self, held: HeldPart, initial: bool = False) -> None:
        """Lay out storage for ``held``, which the model holds. Only spaces that stay keep their values.

        ``initial``: all parameters keep theirs.
        """
        before, slices = self.parameters, self.slices
        self.held, self.slices, start = held, {}, 0
        for key in self._ordered(held):
            self.slices[key] = UnitSlice(start, self.layouts[key])
            start += self.layouts[key].numel
        self.state_stop = start
        members = {unit: tuple(self._interface.unit_parameters(unit)) for unit in held.units}
        self.dtype, self.device = _common_type(members) or (self.dtype, self.device)
        start = self._place(members)
        spare, self.spare = self.spare, None
        if spare is None or spare[0].numel() != start or spare[0].dtype != self.dtype:
            spare = (
                torch.zeros(start, dtype=self.dtype, device=self.device),
                torch.zeros(start, dtype=torch.float32, device=self.device),
            )
        self.parameters, self.gradients = spare
        for key, where in self.slices.items():
            if key in slices:
                self.parameters[where.start : where.stop].copy_(before[slices[key].start : slices[key].stop])
        self._views = {unit: [self._adopt(unit, item, initial) for item in items] for unit, items in members.items()}
        self._view_of = {
            item.parameter: view
            for unit, items in members.items()
            for item, view in zip(items, self._views[unit], strict=True)
        }
        self.filled = initial
        if initial:
            self.spread(self.parameters)
        else:
            self.collect()

    @property
    def has_local(self) -> bool:
        """True if some parameter is not the whole of one shard's: the cell has another size than at the launch."""
        return bool(self._locals)

    def _ordered(self, held: HeldPart) -> list[UnitShard]:
        """Return the spaces of ``held`` that have parameters, in the order of the arena."""
        return sorted((key for key in held.spaces if key in self.layouts), key=lambda key: (key[1], key[0]))

    def _place(self, members: Mapping[int, Sequence[UnitParameter]]) -> int:
        """Give each parameter its place: in a space, or behind all of them. Returns the length of the arena."""
        self._places, self._locals, stop = {}, [], self.state_stop
        for unit, items in members.items():
            for item in items:
                if not _is_local(item.spec, item.overlaps):
                    self._places[unit, item.spec.name] = self._whole(unit, item)
                    continue
                assert item.overlaps is not None
                local = _Local(unit, item.spec, _shape(item), item.overlaps, stop)
                self._places[unit, item.spec.name] = local.start, local.stop
                self._locals.append(local)
                stop = -(-local.stop // ALIGN) * ALIGN
        return stop

    def _length(self, held: HeldPart) -> int:
        """Return the length of the arena that :meth:`_lay` will make for ``held``."""
        keys = self._ordered(held)
        length = sum(self.layouts[key].numel for key in keys)
        if held.place is None:
            return length
        units_with = Counter(
            spec for _, spec in {(key[0], slot.spec) for key in keys for slot in self.layouts[key].slots}
        )
        for spec, units in units_with.items():
            overlaps = self._interface.overlaps(spec, held.place)
            if overlaps is not None and _is_local(spec, overlaps):
                length += units * -(-_filled(overlaps).numel() // ALIGN) * ALIGN
        return length

    def _whole(self, unit: int, item: UnitParameter) -> tuple[int, int]:
        """Return the elements of the arena of the shard's parameter which ``item`` is, whole."""
        name = item.spec.name
        if item.overlaps is None:
            shards = [shard for (of, shard), where in self.slices.items() if of == unit and where.layout.has(name)]
        else:
            shards = [overlap.shard for overlap in item.overlaps]
        if len(shards) != 1:
            raise ValueError(f"unit {unit}: parameter {name} without overlaps is in shards {shards}")
        slot, start = self._slot(unit, shards[0], name), self.slices[unit, shards[0]].start
        return start + slot.start, start + slot.stop

    def _slot(self, unit: int, shard: int, name: str) -> ParamSlot:
        return self.slices[unit, shard].layout.slot(name)

    def place_of(self, unit: int, name: str) -> tuple[int, int]:
        """Return the elements ``[start, stop)`` of the arena where the gradient of a held parameter accumulates."""
        return self._places[unit, name]

    def places(self) -> Collection[tuple[int, int]]:
        """Return the places of the gradients of all held parameters (:meth:`place_of`)."""
        return self._places.values()

    def hand_over(self, receiver: Receiver) -> None:
        """From now on, pass gradients to ``receiver`` and do not add them to :attr:`gradients`."""
        self.release()
        self._receiver = receiver
        for unit, views in self._views.items():
            for item, view in zip(self._interface.unit_parameters(unit), views, strict=True):
                self._attach(item.parameter, view)

    def _adopt(self, unit: int, item: UnitParameter, keep: bool) -> torch.Tensor:
        """Move one parameter's storage into the arena, its value too (``keep``); returns its fp32 gradient view."""
        start, stop = self._places[unit, item.spec.name]
        value = self.parameters[start:stop].view(_shape(item))
        gradient = self.gradients[start:stop].view(_shape(item))
        with torch.no_grad():
            if keep and item.parameter.numel():  # else its storage was freed earlier
                value.copy_(item.parameter)
            item.parameter.data = value
        self._attach(item.parameter, gradient)
        return gradient

    def _attach(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Let autograd's gradients of ``parameter`` go to the receiver, or else be added to the view ``gradient``."""
        if self._receiver is not None:
            parameter.grad = None
            hook = _pass_on(self._receiver, int(gradient.storage_offset()))
        elif self.dtype == torch.float32:
            parameter.grad = gradient
            return
        else:
            hook = _accumulate_into(gradient)
        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def spread(self, values: torch.Tensor, units: Collection[int] | None = None) -> None:
        """Add the local part of ``values`` (of the arena's length, such as gradients) to the spaces in it.

        ``units``: only of these.
        """
        for local in self._locals:
            if units is not None and local.unit not in units:
                continue
            add(local.overlaps, values[local.start : local.stop].view(local.shape), self._remote(local, values))

    def collect(self, units: Collection[int] | None = None) -> None:
        """Read the values of parameters with local storage from the spaces. ``units``: only of these."""
        for local in self._locals:
            if units is not None and local.unit not in units:
                continue
            value = self.parameters[local.start : local.stop].view(local.shape)
            read(local.overlaps, value, self._remote(local, self.parameters))

    def _remote(self, local: _Local, values: torch.Tensor) -> Callable[[int], torch.Tensor]:
        """Return shard → the tensor of that parameter in ``values``, as it was cut at the launch."""

        def remote(shard: int) -> torch.Tensor:
            slot, where = self._slot(local.unit, shard, local.spec.name), self.slices[local.unit, shard]
            return values[where.start + slot.start : where.start + slot.stop].view(slot.spec.shape)

        return remote

    def zero_gradients(self) -> None:
        """Zero all gradients before a step, and attach fp32 views again that a ``zero_grad`` call dropped.

        Nothing is accumulated here, and nothing zeroed, if there is a receiver.
        """
        if self._receiver is not None:
            return
        self.gradients.zero_()
        if self.dtype == torch.float32:
            for unit, views in self._views.items():
                for item, view in zip(self._interface.unit_parameters(unit), views, strict=True):
                    item.parameter.grad = view

    def accumulate(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Add a gradient that was computed outside of autograd, or pass it to the receiver, like those of autograd."""
        view = self._view_of[parameter]
        if self._receiver is None:
            view.add_(gradient)
        else:
            self._receiver(int(view.storage_offset()), gradient)

    @contextmanager
    def watching(self, units: Collection[int], told: Callable[[int], None]) -> Iterator[None]:
        """Call ``told(unit)`` when autograd has accumulated a gradient for each parameter of one of ``units``.

        On the thread that runs the backward, at the latest parameter. Not for a unit of which a parameter gets none.
        """
        handles = []
        for unit in units:
            missing = {item.parameter for item in self._interface.unit_parameters(unit)}

            def note(parameter: torch.nn.Parameter, unit: int = unit, missing: set[Any] = missing) -> None:
                if parameter in missing:
                    missing.discard(parameter)
                    if not missing:
                        told(unit)

            handles += [parameter.register_post_accumulate_grad_hook(note) for parameter in tuple(missing)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def gradient_views(self) -> Mapping[int, Sequence[torch.Tensor]]:
        """Return the fp32 gradient of each parameter, in its shape, per unit."""
        return self._views

    def block_parameters(self, block: StateBlock) -> torch.Tensor:
        """Return the parameters of a block: 1-D, model type, a view."""
        start = self.slices[block.key[:2]].start
        return self.parameters[start + block.start : start + block.stop]

    def set_parameters(self, values: Sequence[tuple[StateBlock, torch.Tensor]]) -> None:
        """Write the parameters of blocks (fp32, of host memory or of this device's).

        Those of host memory go to a device in one piece.
        """
        away = [number for number, (_, part) in enumerate(values) if part.device.type != self.device.type]
        brought: dict[int, torch.Tensor] = {}
        if away:
            parts = [values[number][1] for number in away]
            sizes = [part.numel() for part in parts]
            whole = torch.cat(parts, out=torch.empty(sum(sizes), pin_memory=self.device.type != "cpu"))
            brought = dict(zip(away, whole.to(self.device, non_blocking=True).split(sizes), strict=True))
        for number, (block, part) in enumerate(values):
            self.block_parameters(block).copy_(brought.get(number, part))

    def block_gradients(self, block: StateBlock) -> torch.Tensor:
        """Return the fp32 gradients of a block: 1-D, a view."""
        start = self.slices[block.key[:2]].start
        return self.gradients[start + block.start : start + block.stop]

    def release(self) -> None:
        """Detach from the model (hooks removed; parameters keep their storage)."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _shape(item: UnitParameter) -> torch.Size:
    """Return the shape of the live tensor; it may have no storage yet."""
    return torch.Size(item.spec.shape) if item.overlaps is None else _filled(item.overlaps)


def _filled(overlaps: Sequence[Overlap]) -> torch.Size:
    """Return the shape of the local tensor that the overlaps fill."""
    return torch.Size(max(stop for _, stop in ranges) for ranges in zip(*(o.local for o in overlaps), strict=True))


def _is_local(spec: ParamSpec, overlaps: Sequence[Overlap] | None) -> bool:
    """Return whether a parameter is something else than the whole of one shard's: it needs storage of its own."""
    whole = tuple((0, size) for size in spec.shape)
    return overlaps is not None and (len(overlaps) > 1 or overlaps[0].remote != whole)


def _common_type(members: Mapping[int, Sequence[UnitParameter]]) -> tuple[torch.dtype, torch.device] | None:
    kinds = {(item.parameter.dtype, item.parameter.device) for items in members.values() for item in items}
    if len(kinds) > 1:
        raise ValueError(f"parameters of one rank must share a type and a device, found {sorted(map(str, kinds))}")
    return kinds.pop() if kinds else None


def _accumulate_into(gradient: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            gradient.add_(parameter.grad)
            parameter.grad = None

    return hook


def _pass_on(receiver: Receiver, start: int) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            gradient, parameter.grad = parameter.grad, None
            receiver(start, gradient)

    return hook
