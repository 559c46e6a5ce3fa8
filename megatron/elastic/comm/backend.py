"""The fabric under ``torch.distributed``: default group, ``new_group``, backend name ``elastic``.

``install`` makes the fabric's world the default process group. No rank waits for
another: a joiner does it alone, in a world of one. What is replaced in
``torch.distributed`` is listed in :data:`REPLACED` and undone by
``Installation.undo``:

- ``distributed_c10d._new_group_with_tag``, through which every ``new_group``
  goes: stock torch names groups by process-local counters and adds barriers,
  so that a survivor and a newcomer wait for each other for ever. Ours is local
  and names by (role, members), the n-th of the same kind getting a ``#n``.
- ``distributed_c10d._tensor_to_object``: the object of a hole in the slot
  space is None (its size is 0, which no pickle has).
- ``broadcast_object_list``: a root that is gone is stood in for by the first
  living member, as for tensors.
- ``batch_isend_irecv``: a group that takes batches is given the whole list.
- ``monitored_barrier`` takes our groups too (:mod:`megatron.elastic.comm.monitored`).
"""

from __future__ import annotations

import atexit
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron.elastic.comm import monitored, registry
from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.comm.gloo.fabric import GlooFabric
from megatron.elastic.comm.reconfigure import handle_of, members_of
from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.platform.base import Platform
from megatron.elastic.platform.select import select

__all__ = ["REPLACED", "Installation", "Make", "creation", "install", "make_fabric", "register_backend"]

REPLACED = (
    "_new_group_with_tag",
    "_tensor_to_object",
    "broadcast_object_list",
    "batch_isend_irecv",
    "monitored_barrier",
)
"""Names replaced in torch.distributed.distributed_c10d, and in torch.distributed where it has them."""

DEFAULT_ROLE = "group"


def make_fabric(
    config: ElasticConfig,
    rank: int,
    slots: int,
    incarnation: int,
    run_id: str,
    secret: bytes,
    store: dist.Store | Callable[[], dist.Store],
    *,
    host: str = "127.0.0.1",
    timeout: float = 60.0,
    dense_world: bool = False,
    silent: float = 20.0,
    platform: Platform | None = None,
) -> Fabric:
    """The fabric that ``config.comm`` names, not connected yet.

    ``store`` (or a function that connects to it: clients do not survive a fork)
    is served outside the ranks; only gloo needs it. ``secret`` authenticates
    native links, which break after ``silent`` seconds without an acknowledgement. With
    ``dense_world`` the default group counts the living.
    ``platform`` (default: the machine's) says whether bulk tensors of a device go
    through its vendor's library. Raises ``ConfigError`` for what is not there.
    """
    if config.comm == "gloo":
        client = store() if callable(store) else store
        return GlooFabric(
            rank, slots, incarnation, client, run_id=run_id, host=host, timeout=timeout, dense_world=dense_world
        )
    try:
        from megatron.elastic.comm.native import NativeFabric
    except ImportError as error:
        raise ConfigError(
            f"--elastic-comm elastic needs the native core ({error}); build it or use --elastic-comm gloo"
        ) from error
    native: dict[str, Any] = {
        "run_id": run_id,
        "secret": secret,
        "transport": config.transport,
        "host": host,
        "timeout": timeout,
        "dense_world": dense_world,
        "silent": silent,
    }
    found = platform or select()
    if found.name == "cpu":
        return NativeFabric(rank, slots, incarnation, **native)
    from megatron.elastic.comm.vendor.selection import vendor_of  # opens the vendor's library

    return vendor_of(found, store).fabric(rank, slots, incarnation, **native)


@dataclass
class Installation:
    """The changes of :func:`install`, and their undo.

    With ``own_timeouts`` the time-out given to ``new_group`` counts. Else all waits have the fabric's, on which the
    detection of losses relies.
    """

    fabric: Fabric
    own_timeouts: bool = False
    originals: dict[str, Any] = field(default_factory=dict)
    counts: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)

    def new_group(
        self, ranks: Sequence[int] | None, description: str | None, sort_ranks: bool, timeout: timedelta | None = None
    ) -> dist.ProcessGroup:
        """The group of ``ranks``; ``NON_GROUP_MEMBER`` elsewhere. Purely local."""
        world = self.fabric.slots
        chosen = list(range(world)) if ranks is None else [int(rank) for rank in ranks]
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"ranks list must not contain duplicate entries, got {chosen}")
        if any(not 0 <= rank < world for rank in chosen):
            raise ValueError(f"ranks {chosen} are not all within the {world} slots of the job")
        members = tuple(sorted(chosen) if sort_ranks else chosen)
        if self.fabric.rank not in members:
            return cast(dist.ProcessGroup, dist.GroupMember.NON_GROUP_MEMBER)
        role = description if description and description != "undefined" else DEFAULT_ROLE
        self.counts[role, members] += 1
        if self.counts[role, members] > 1:
            role = f"{role}#{self.counts[role, members]}"
        group = self.fabric.group(role, members)
        group._set_group_desc(role)
        if timeout is not None and self.own_timeouts:
            group.set_timeout(timeout)
        return group

    def undo(self) -> None:
        """Take the default group away and put torch's functions back. Idempotent."""
        for name, original in self.originals.items():
            setattr(c10d, name, original)
            if hasattr(dist, name):
                setattr(dist, name, original)
        self.originals.clear()
        if c10d._world.default_pg is self.fabric.world:
            registry.unregister(self.fabric.world)
            c10d._update_default_pg(None)


def install(fabric: Fabric, store: dist.Store | None = None) -> Installation:
    """Make ``fabric.world`` the default process group and ``new_group`` local.

    ``store`` is what ``distributed_c10d._get_default_store()`` will return.
    Raises ``CommError`` when another default group is there already.
    """
    if dist.is_initialized():
        raise CommError("torch.distributed is initialized already: install the fabric before it")
    os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "0")
    members = tuple(range(fabric.slots))
    name = registry.group_name("world", members)
    registry.register(fabric.world, name, store or dist.HashStore(), members, registry.Living(members))
    c10d._world.pg_group_ranks[fabric.world] = {rank: rank for rank in members}
    c10d._update_default_pg(fabric.world)
    installation = Installation(fabric)
    _replace_functions(installation)
    return installation


def _replace_functions(installation: Installation) -> None:
    fabric = installation.fabric
    originals = {name: getattr(c10d, name) for name in REPLACED}

    def new_group_with_tag(
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        *args: Any,
        group_desc: str | None = None,
        sort_ranks: bool = True,
        **kwargs: Any,
    ) -> dist.ProcessGroup:
        return installation.new_group(ranks, group_desc, sort_ranks, timeout)

    def tensor_to_object(tensor: torch.Tensor, tensor_size: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        if int(tensor_size) == 0:
            return None
        return originals["_tensor_to_object"](tensor, tensor_size, group, *args, **kwargs)

    def broadcast_object_list(
        object_list: list[Any],
        src: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        group_src: int | None = None,
        **kwargs: Any,
    ) -> None:
        if src is None and group_src is None:
            src = 0
        if not c10d._rank_not_in_group(group):
            src, group_src = _standing_in(fabric, group, src, group_src)
        originals["broadcast_object_list"](object_list, src, group, device, group_src, **kwargs)

    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        group = (p2p_op_list[0].group if p2p_op_list else None) or c10d._get_default_group()
        if not getattr(group, "batches_messages", False):
            return cast(list[dist.Work], originals["batch_isend_irecv"](p2p_op_list))
        c10d._check_p2p_op_list(p2p_op_list)
        with c10d._coalescing_manager(group, p2p_op_list[0].tensor.device, async_ops=True) as manager:
            for each in p2p_op_list:
                peer = {"group_dst" if each.op is dist.isend else "group_src": each.group_peer}
                each.op(each.tensor, group=each.group, tag=each.tag, **peer)
        return cast(list[dist.Work], manager.works)

    ours = (
        new_group_with_tag,
        tensor_to_object,
        broadcast_object_list,
        batch_isend_irecv,
        monitored.for_our_groups(originals["monitored_barrier"]),
    )
    for name, function in zip(REPLACED, ours, strict=True):
        setattr(c10d, name, function)
        if hasattr(dist, name):
            setattr(dist, name, function)
    installation.originals = originals


def _standing_in(
    fabric: Fabric, group: dist.ProcessGroup | None, src: int | None, group_src: int | None
) -> tuple[int | None, int | None]:
    """The root of an object broadcast, replaced by the first living member where it is gone."""
    alive = fabric.alive
    # The default group need not be the world: a save numbers the living without holes for its time.
    group = c10d._get_default_group() if group is None else group
    if group is fabric.world:
        root = src if src is not None else group_src
        return (root if root in alive else alive[0]), None
    living = dist.get_process_group_ranks(group)
    if src is not None and src not in living:
        return living[0], None
    return src, group_src


Make = Callable[[dist.Store, int, int, timedelta, bool], Fabric]
"""``make(store, rank, world_size, timeout, dense_world)`` returns a fabric that is not connected yet."""


def register_backend(make: Make, driven: bool = False) -> None:
    """Teach torch the backend name ``elastic`` (CPU); see :func:`creation`. The last call counts."""
    if hasattr(dist.Backend, registry.BACKEND_NAME.upper()):
        delattr(dist.Backend, registry.BACKEND_NAME.upper())
    dist.Backend.register_backend(registry.BACKEND_NAME, creation(make, driven), extended_api=True, devices=["cpu"])


def creation(make: Make, driven: bool = False) -> Callable[[Any, object], dist.ProcessGroup]:
    """Return what ``init_process_group(backend="elastic")`` is to call.

    It makes a fabric, connects the ranks through the store and returns the fabric's world, the default group. With
    ``enable_reconfigure=True`` (torch 2.14 and later; before, by ``driven``) that stays a world of one, and dense,
    until a manager's ``_reconfigure``.

    The fabric ends with its group (``destroy_process_group``), at the latest when the interpreter begins to exit. An
    operation that is still under way then fails, on its other ranks too. Threads must not outlive that: one that then
    drops a tensor of the program's needs the interpreter's lock, and the process aborts (pytorch issue 190489).
    """

    def create(options: Any, _: object) -> dist.ProcessGroup:
        reconfigured = driven or bool(getattr(options, "enable_reconfigure", False))
        fabric = make(options.store, options.group_rank, options.group_size, options.timeout, reconfigured)
        installation = Installation(fabric, own_timeouts=True)
        _replace_functions(installation)

        def end() -> None:
            atexit.unregister(end)
            installation.undo()
            fabric.close()

        atexit.register(end)
        setattr(fabric.world, "shutdown", end)  # noqa: B010 - torch calls it when the group is destroyed
        if not reconfigured:
            _connect(fabric, options.store, options.timeout)
        return fabric.world

    return create


def _connect(fabric: Fabric, store: dist.Store, timeout: timedelta) -> None:
    """Generation 1 of all slots, by handles in ``store``: those of the same time that a rank makes its group."""
    count = store.add(f"elastic/made/{fabric.rank}", 1)
    key = f"elastic/handle/{count}/{{}}".format
    store.set(key(fabric.rank), handle_of(fabric))
    handles = [store.get(key(rank)).decode() for rank in range(fabric.slots)]
    fabric.edit(1, members_of(handles), timeout.total_seconds())
