"""The contract of every fabric, as functions run by each of four ranks (``test_fabric_contract.py``).

A check gets an edited fabric with ranks 0–3 alive and installed under
``torch.distributed``; it raises when a claim is not met. ``SEED`` is in every
message that compares numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec
import torch

from megatron.elastic.comm.address import Address
from megatron.elastic.comm.fabric import Fabric
from tools.bench._common import Here

SEED = 20240607
WORLD = (0, 1, 2, 3)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

Check = Callable[[Here, Fabric], None]


def values(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in every dtype; the same on every process."""
    generator = torch.Generator().manual_seed(SEED + 1000 * salt + rank)
    numbers = torch.randint(1, 4, (count,), generator=generator)
    return numbers > 2 if dtype == torch.bool else numbers.to(dtype)


def same(got: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    assert got.dtype == wanted.dtype and torch.equal(got, wanted), f"{what} (seed {SEED}): {got} is not {wanted}"


def addresses(here: Here, fabric: Fabric, ranks: Iterable[int], generation: int) -> dict[int, Address]:
    """Swap addresses as the control plane would."""
    found: Mapping[int, dict[str, object]] = here.exchange(
        f"{generation}", msgspec.to_builtins(fabric.address()), ranks
    )
    return {rank: Address(**value) for rank, value in found.items()}  # type: ignore[arg-type]


def edit(here: Here, fabric: Fabric, ranks: Iterable[int], generation: int) -> None:
    """All of ``ranks`` arrive, are interrupted, then edited: nobody's old generation ends under work in flight."""
    decided = addresses(here, fabric, tuple(ranks), generation)
    fabric.interrupt(generation)
    fabric.edit(generation, decided, 20.0)


def sum_of(count: int, ranks: Iterable[int], salt: int = 0) -> torch.Tensor:
    return torch.stack([values(rank, count, torch.float32, salt) for rank in ranks]).sum(0)
