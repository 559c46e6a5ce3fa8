"""Messages of blocks from their owners to other ranks, or back: all of one exchange are awaited together.

Gradients go to mirrors in messages of their own (:mod:`shipment`), whose memory stays.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.elastic.engine.compute.point_to_point import started
from megatron.elastic.engine.generation.view import Routes
from megatron.elastic.engine.transaction.tools import Tools
from megatron.elastic.state.layout import StateBlock

__all__ = ["exchange_blocks"]


def exchange_blocks(
    tools: Tools,
    way: Routes,
    pack: Callable[[tuple[StateBlock, ...]], torch.Tensor],
    unpack: Callable[[tuple[StateBlock, ...], tuple[torch.Tensor, ...], torch.Tensor], None],
    width: int,
    extra: int,
    tag: int,
    under_way: Callable[[], object] | None = None,
) -> None:
    """Send one message from every owner to each rank that its blocks go to.

    It has ``width`` fp32 values an element, followed by ``extra`` values a block. ``under_way`` is called when
    this rank's messages have begun, if it has any.
    """
    group = tools.fabric.group("mirror", range(tools.fabric.slots))
    arriving: list[tuple[dist.Work, torch.Tensor, tuple[StateBlock, ...], int]] = []
    for owner, blocks in way.incoming.items():
        length = sum(width * block.numel + extra for block in blocks)
        buffer = torch.empty(length, dtype=torch.float32)
        arriving.append((started(dist.irecv(buffer, src=owner, group=group, tag=tag)), buffer, blocks, owner))
    leaving: list[tuple[dist.Work, torch.Tensor]] = []
    for mirror, blocks in way.outgoing.items():
        packed = pack(blocks)
        leaving.append((started(dist.isend(packed, dst=mirror, group=group, tag=tag)), packed))
    if under_way is not None and (arriving or leaving):
        under_way()
    for work, buffer, blocks, owner in arriving:
        tools.publish("mirror", (owner,))
        work.wait()
        *parts, rest = buffer.split([*(width * block.numel for block in blocks), extra * len(blocks)])
        unpack(blocks, tuple(parts), rest)
    for work, _ in leaving:
        work.wait()
