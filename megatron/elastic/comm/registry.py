"""The tables of ``torch.distributed``'s Python layer about a group, kept true.

``dist.get_rank(group)``, ``get_process_group_ranks`` and every collective that
takes a global root read ``_world.pg_group_ranks``, not the group. The tables put there (:class:`LivingRanks`)
follow one :class:`Living` a fabric. An edit changes that object, and each table is numbered anew when it is
next read. So the cost of an edit does not depend on the number of groups. All access to torch's tables from this
package goes through here.

Names are (role, members), so that processes with different histories agree.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = ["Living", "LivingRanks", "group_name", "register", "set_ranks", "unregister"]

BACKEND_NAME = "elastic"


def group_name(role: str, members: Sequence[int]) -> str:
    """``("tp", (0, 1))`` → ``"tp:0,1"``."""
    return f"{role}:{','.join(map(str, members))}"


class Living:
    """The present members, for all tables that follow it. ``ranks`` is replaced as a whole, never changed."""

    def __init__(self, ranks: Container[int]) -> None:
        self.ranks = ranks


class LivingRanks(Mapping[int, int]):
    """Global rank → group rank of the living, in member order.

    Iteration and length show the living only. A dead member can still be named:
    Megatron keeps source ranks of groups for ever. It answers with a group rank
    beyond the living ones, ``size + index of the member``, from which the group recognises it. The first
    living member then replaces a collective's root; a point-to-point peer is reported lost.
    """

    def __init__(self, members: Sequence[int], living: Living) -> None:
        self._members = tuple(members)
        self._living = living
        self._numbered: tuple[Container[int], dict[int, int]] = ((), {})

    def _places(self) -> dict[int, int]:
        ranks, (seen, places) = self._living.ranks, self._numbered
        if seen is not ranks:
            places = {rank: place for place, rank in enumerate(rank for rank in self._members if rank in ranks)}
            self._numbered = ranks, places
        return places

    def __getitem__(self, rank: int) -> int:
        places = self._places()
        if rank in places:
            return places[rank]
        if rank in self._members:
            return len(places) + self._members.index(rank)
        raise KeyError(rank)

    def __contains__(self, rank: object) -> bool:
        return rank in self._members

    def __iter__(self) -> Iterator[int]:
        return iter(self._places())

    def __len__(self) -> int:
        return len(self._places())


def register(group: dist.ProcessGroup, name: str, store: dist.Store, members: Sequence[int], living: Living) -> None:
    """Make ``group`` known to torch.distributed under ``name``."""
    world = c10d._world
    world.pg_map[group] = (BACKEND_NAME, store)
    world.pg_names[group] = c10d.GroupName(name)
    world.pg_backend_config[group] = f"cpu:{BACKEND_NAME}"
    world.tags_to_pg.setdefault("", []).append(group)
    world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
    world.pg_to_tag[group] = f"ptd:{name}"
    c10d._register_process_group(c10d.GroupName(name), group)
    set_ranks(group, members, living)


def set_ranks(group: dist.ProcessGroup, members: Sequence[int], living: Living) -> None:
    """Record that the members in ``living`` take part."""
    c10d._world.pg_group_ranks[group] = cast("dict[int, int]", LivingRanks(members, living))


def unregister(group: dist.ProcessGroup) -> None:
    """Take ``group`` out of every table; harmless when it is in none."""
    world = c10d._world
    name = world.pg_names.pop(group, None)
    world.pg_map.pop(group, None)
    world.pg_group_ranks.pop(group, None)
    world.pg_backend_config.pop(group, None)
    world.pg_coalesce_state.pop(group, None)
    tag = world.pg_to_tag.pop(group, None)
    for key in ("", tag):
        groups = world.tags_to_pg.get(key) if key is not None else None
        if groups and group in groups:
            groups.remove(group)
            if not groups and key:
                del world.tags_to_pg[key]
    if name is not None:
        c10d._unregister_process_group(name)
