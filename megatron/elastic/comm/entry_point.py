"""The backend name ``elastic`` in any program that uses ``torch.distributed``, without an import of ours.

``import torch`` calls :func:`register` (entry point ``torch.backends``, through ``megatron_elastic_torch``). A program
under ``torchrun`` then writes ``init_process_group("elastic")``. Rank 0 draws the secret of the links and puts it into
the program's store: who can read the store can join the group, as with any other backend.

Invariant: :func:`register` adds a name and imports nothing more of this package, so that ``import torch`` stays as fast
and as safe as it was.
"""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from megatron.elastic.comm.fabric import Fabric

__all__ = ["address_towards", "fabric_of_program", "register"]

_DRAWN = "elastic/drawn"
"""Key of the run's name, which others may read, and the secret of its links."""
_NAME = "elastic"


def register() -> None:
    """Teach torch the backend name ``elastic`` (CPU), unless some program has done so."""
    if dist.is_available() and not hasattr(dist.Backend, _NAME.upper()):
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: object) -> dist.ProcessGroup:
    from megatron.elastic.comm.backend import creation

    return creation(fabric_of_program)(options, backend_options)


def fabric_of_program(store: dist.Store, rank: int, size: int, timeout: timedelta, dense: bool) -> Fabric:
    """Return the fabric of one rank of a program, not connected yet. Raises ``ConfigError`` without the native core."""
    from megatron.elastic.comm.backend import make_fabric
    from megatron.elastic.config import ElasticConfig

    if rank == 0:  # drawn once: the next group of the same ranks finds it
        store.compare_set(_DRAWN, "", f"{secrets.token_hex(8)} {secrets.token_hex(16)}")
    run_id, secret = store.get(_DRAWN).decode().split()
    return make_fabric(
        ElasticConfig(),
        rank,
        size,
        0,
        run_id,
        bytes.fromhex(secret),
        store,
        host=address_towards(store),
        timeout=timeout.total_seconds(),
        dense_world=dense,
    )


def address_towards(store: dist.Store) -> str:
    """Return this machine's address on the way to the store's host; loopback where that is no other machine."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return "127.0.0.1"
    family, kind, _, _, there = socket.getaddrinfo(store.host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)  # sends nothing: it only asks the routing table
        return str(probe.getsockname()[0])
