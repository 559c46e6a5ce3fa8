"""The self-test of a device's update: whether it leads to the bits of the host's kernel.

Owners step on the device, mirrors on the host, so ``gradient`` mode needs equal bits. Whether a device
divides, takes square roots and keeps denormals as IEEE-754 says is not a matter of its name, so each process tries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.elastic.state.adam import AdamScalars, LionScalars, SgdScalars
from megatron.elastic.state.lion import Lion
from megatron.elastic.state.place import HOST, Place

__all__ = ["ELEMENTS", "differing", "trial_values"]

ELEMENTS = 3 << 16
"""Of each trial: enough that rare roundings of a square root or a quotient occur."""
_STEPS = 3


def trial_values(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return parameters and gradients, fp32 ``[ELEMENTS]``.

    They have all magnitudes of a training, and among them zeros of both signs, denormals, and values whose squares
    underflow or overflow.
    """
    made = torch.Generator().manual_seed(seed)
    parameters = torch.randn(ELEMENTS, generator=made) * torch.exp2(torch.randint(-12, 4, (ELEMENTS,), generator=made))
    exponents = torch.randint(-60, 8, (ELEMENTS,), generator=made)
    gradients = torch.randn(ELEMENTS, generator=made) * torch.exp2(exponents)
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, -2.3e-39, 1e-20, -3e-23, 3e19, -1e20, 3e38, -1.0])
    gradients[: 64 * len(odd)] = odd.repeat(64)
    parameters[len(odd) : 32 * len(odd)] = odd.repeat_interleave(31)
    return parameters, gradients


def _trials() -> Iterator[tuple[str, AdamScalars | LionScalars | SgdScalars]]:
    for decoupled in (True, False):
        for step in range(1, _STEPS + 1):
            bias = 1 - 0.9**step, 1 - 0.95**step
            yield "Adam", AdamScalars(0.37 / step, 3e-4, 0.9, 0.95, 1e-8, 0.1, *bias, decoupled)
    for _ in range(_STEPS):
        yield "Lion", LionScalars(0.37, 3e-4, 0.1, Lion(0.95, 0.98))
    yield "SGD", SgdScalars(0.37, 3e-2, 0.9, 0.1)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two host tensors have equal bits; any NaN equals any other."""
    equal = a.view(torch.int32) == b.view(torch.int32)
    return bool((equal | (a.isnan() & b.isnan())).all())


def differing(place: Place) -> tuple[str, ...]:
    """Return the updates whose results at ``place`` have other bits than the host's; none as a rule."""
    found: list[str] = []
    here = [torch.zeros(ELEMENTS) for _ in range(3)]
    there = [place.empty(ELEMENTS).zero_() for _ in range(3)]
    for seed, (name, scalars) in enumerate(_trials()):
        parameters, gradients = trial_values(seed)
        for states in (here, there):
            states[0].copy_(parameters)
        for where, states in ((HOST, here), (place, there)):
            (master, first, second), gradient = states, where.bring(gradients)
            if isinstance(scalars, AdamScalars):
                where.adam(master, first, second, gradient, scalars)
            elif isinstance(scalars, LionScalars):
                where.lion(master, first, gradient, scalars)
            else:
                where.sgd(master, first, gradient, scalars)
        if not all(_same(a, place.to_host(b)) for a, b in zip(here, there, strict=True)) and name not in found:
            found.append(name)
    moments = here[1].clone(), there[1].clone()
    for where, values in zip((HOST, place), moments, strict=True):
        where.keep_in_bf16(values)
    if not found and not _same(moments[0], place.to_host(moments[1])):
        found.append("rounding to bf16")
    return tuple(found)
