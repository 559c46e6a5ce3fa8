"""The bytes that training takes a parameter: this engine's, and those of Megatron's distributed optimizer beside it.

A rank holds the parameters and gradients of the layers that it computes. Of their optimizer's state, in a
data-parallel group of n ranks, it holds an n-th as owner and k n-ths as mirror. Activations and buffers of the
framework are the same in both and not counted, and neither are messages that are made for one step alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.elastic.state.block_copy import TOGETHER

__all__ = ["MIRROR_BYTES", "OWNER_BYTES", "SUM_BYTES", "Bytes", "MemoryRow", "Training", "memory_rows", "table"]

_STATE = 12
"""Of a copy: master, first and second moment, fp32."""
_GRADIENT = 4
OWNER_BYTES = _STATE + _GRADIENT
"""Of an owned copy in ``gradient`` mode, with the gradient that it retains."""
MIRROR_BYTES = _STATE + TOGETHER * _GRADIENT
"""Of a mirrored copy in ``gradient`` mode, with the gradients of the steps that it makes together."""
SUM_BYTES = 8
"""Of a gradient's sum in exact mode, beside the gradient."""
_GIB = 2**30


@dataclass(frozen=True)
class Bytes:
    """Bytes a parameter."""

    device: float
    host: float

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host)


@dataclass(frozen=True)
class MemoryRow:
    """One line of the table."""

    name: str
    each: Bytes


@dataclass(frozen=True)
class Training:
    """The figures that the bytes depend on."""

    parameters: int
    """Of one rank: those of the layers that it computes, cut for tensor parallelism."""
    ranks: int
    """Of its data-parallel group."""
    itemsize: int
    """Bytes of a parameter of the model."""
    mirrors: int
    on_device: bool
    """True if owned blocks lie in device memory."""
    snapshot: Literal["gradient", "state"] = "gradient"
    accelerator: bool = True
    """False on a CPU, where all memory is the host's."""
    exact: bool = False
    """Gradients are summed as integers first."""

    @property
    def owner(self) -> Bytes:
        """Bytes of owned blocks, and of the messages that take their gradients to mirrors.

        A gradient of the host is retained in its message, one of a device in a copy that the message is made from.
        """
        states = 2 * _STATE if self.snapshot == "state" else _STATE
        messages = 0 if self.snapshot == "state" else self.mirrors * _GRADIENT
        if self.on_device:
            return Bytes((states + _GRADIENT) / self.ranks, (_GRADIENT + messages) / self.ranks)
        return Bytes(0, (states + max(_GRADIENT, messages)) / self.ranks)

    @property
    def mirror(self) -> Bytes:
        """Bytes of mirrored blocks."""
        held = 2 * _STATE if self.snapshot == "state" else MIRROR_BYTES
        return Bytes(0, self.mirrors * held / self.ranks)


def memory_rows(training: Training) -> tuple[MemoryRow, ...]:
    """Return the rows of this engine, their sum, and the sum of Megatron with its distributed optimizer."""
    held = training.itemsize + _GRADIENT
    model = MemoryRow("parameters and gradients", Bytes(held, 0) if training.accelerator else Bytes(0, held))
    copies = f"{training.mirrors} mirror{'s' * (training.mirrors != 1)}"
    sums = MemoryRow("sums of exact mode", Bytes(SUM_BYTES, 0) if training.accelerator else Bytes(0, SUM_BYTES))
    state = (MemoryRow("owned state", training.owner), MemoryRow(copies, training.mirror))
    parts = (model, *([sums] if training.exact else []), *state)
    total = sum((part.each for part in parts), Bytes(0, 0))
    # Megatron steps fp32 parameters in place and keeps no other master of them.
    plain = held + (_STATE - (4 if training.itemsize == 4 else 0)) / training.ranks
    beside = Bytes(plain, 0) if training.accelerator else Bytes(0, plain)
    return (*parts, MemoryRow("in all", total), MemoryRow("Megatron, distributed optimizer", beside))


def table(training: Training) -> Iterator[Sequence[str]]:
    """Yield the cells of the table: name, device and host bytes a parameter, device and host GiB a rank."""
    for row in memory_rows(training):
        each = row.each.device, row.each.host
        yield (
            row.name,
            *(f"{value:.2f}" for value in each),
            *(f"{value * training.parameters / _GIB:.2f}" for value in each),
        )
