# mypy: disable-error-code="override, assignment"
"""A process group whose object lives for ever while the gloo group inside is rebuilt.

The members and their ranks are a :class:`~megatron.elastic.comm.gloo.seating.Seating`,
replaced as a whole by an edit; how tensors travel is :mod:`~megatron.elastic.comm.gloo.tensors`.

(Type checking of overrides is off here: torch's stubs give each collective
several overloads of its own wording, and lack others that exist.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.elastic.comm.batched_work import BatchedWork
from megatron.elastic.comm.call_arguments import Op, broadcast_in, op_in, options_in, tensor_list
from megatron.elastic.comm.errors import CommError, PeerLost
from megatron.elastic.comm.gloo.seating import Seated, Seating
from megatron.elastic.comm.gloo.tensors import Movable, Reducible
from megatron.elastic.comm.gloo.wait import Waiters, await_collective
from megatron.elastic.comm.gloo.work import GlooWork, Waits
from megatron.elastic.comm.reconfigure import Driven, Reconfigurable

__all__ = ["GlooGroup", "GroupHost"]

Tensors = list[torch.Tensor]


class GroupHost(Waits, Reconfigurable, Protocol):
    """The part of its fabric that a group needs."""

    timeout: float
    waiters: Waiters

    def inner(self, group: GlooGroup) -> tuple[Any, Seating]:
        """The gloo group of the present generation; raises ``GenerationChanged`` when one is frozen."""

    def forget(self, group: GlooGroup) -> None:
        """Drop the group (``destroy_process_group``)."""


class GlooGroup(Driven, Seated, dist.ProcessGroup):
    """See the module docstring. Made by ``GlooFabric.group`` only."""

    def __init__(self, host: GroupHost, role: str, members: tuple[int, ...], seating: Seating) -> None:
        super().__init__(seating.rank, seating.size)  # type: ignore[call-arg]
        self.role = role
        self.members = members
        self.seating = seating
        self._host = self._fabric = host
        self._batch: list[dist.Work] | None = None
        self._own_timeout: float | None = None

    # -- identity -----------------------------------------------------------

    def getBackendName(self) -> str:
        return "elastic"

    def setGroupName(self, name: str) -> None:
        """The name is (role, members) and stays so."""

    def name(self) -> str:
        return "elastic"

    def set_timeout(self, timeout: timedelta) -> None:
        """Give the waits of this group a time-out of their own, instead of the fabric's."""
        self._own_timeout = timeout.total_seconds()

    @property
    def _seconds(self) -> float:
        return self._host.timeout if self._own_timeout is None else self._own_timeout

    def abort(self) -> None:
        """Nothing to do here: waits are ended by ``Fabric.interrupt``, groups by ``Fabric.edit``."""

    def shutdown(self) -> None:
        self._host.forget(self)

    # -- reductions ---------------------------------------------------------

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Sum (or ``opts.reduceOp``) over the living, in place."""
        tensors = tensor_list(tensors)
        return self._reduce_all(tensors, op_in(args, kwargs))

    def allreduce_coalesced(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        return self._reduce_all(tensor_list(tensors), op_in(args, kwargs))

    def _reduce_all(self, tensors: Tensors, op: Op) -> dist.Work:
        inner, seating = self._host.inner(self)
        travelling = [Reducible(tensor, op, len(seating.living)) for tensor in tensors]
        works = []
        for item in travelling:
            opts = dist.AllreduceOptions()
            opts.reduceOp = item.op
            if item.data.numel():
                works.append(inner.allreduce([item.data], opts))
        return self._work(works, seating, tensors, _finishing(travelling))

    def reduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        tensors, opts = tensor_list(tensors), options_in(args, kwargs, dist.ReduceOptions)
        if args and not isinstance(args[0], dist.ReduceOptions):
            opts.rootRank, opts.reduceOp = int(args[0]), args[1] if len(args) > 1 else dist.ReduceOp.SUM
        inner, seating = self._host.inner(self)
        item = Reducible(tensors[0], opts.reduceOp, len(seating.living))
        own = dist.ReduceOptions()
        own.reduceOp, own.rootRank = item.op, seating.root(opts.rootRank)
        works = [inner.reduce([item.data], own)] if item.data.numel() else []
        finish = item.finish if seating.own == own.rootRank else None
        return self._work(works, seating, tensors, finish)

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """``inputs[0]``: a tensor per group rank; those of holes are not read."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._reduce_scatter(outputs, [list(row) for row in inputs], op_in(args, kwargs))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        """``input`` holds ``size()`` equal parts, in order of group rank."""
        return self._reduce_scatter([output], [self._parts(input)], op_in(args, kwargs))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, *args: Any, **kwargs: Any
    ) -> dist.Work:
        return self._reduce_scatter(outputs, [self._parts(part) for part in inputs], op_in(args, kwargs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], op: Op) -> dist.Work:
        """All-reduce of the concatenation, then the own part: faster on gloo than its reduce-scatter."""
        inner, seating = self._host.inner(self)
        works: list[dist.Work] = []
        endings: list[Callable[[], None]] = []
        for output, parts in zip(outputs, inputs, strict=True):
            rows = [parts[seat].reshape(-1) for seat in seating.seats()]
            starts = [0]
            for row in rows:
                starts.append(starts[-1] + row.numel())
            item = Reducible(torch.cat(rows), op, len(seating.living))
            opts = dist.AllreduceOptions()
            opts.reduceOp = item.op
            if item.data.numel():
                works.append(inner.allreduce([item.data], opts))
            endings.append(_taking(item, output, starts[seating.own], starts[seating.own + 1]))
        return self._work(works, seating, outputs, _all(endings))

    # -- gathers ------------------------------------------------------------

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """``outputs[0]``: a tensor per group rank; those of holes are left untouched."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._gather_all([list(row) for row in outputs], list(inputs))

    def allgather_coalesced(self, outputs: Any, inputs: Tensors, *args: Any, **kwargs: Any) -> dist.Work:
        return self._gather_all([list(row) for row in outputs], list(inputs))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        """``output`` holds ``size()`` equal parts, in order of group rank."""
        return self._gather_all([self._parts(output)], [input], [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, *args: Any, **kwargs: Any) -> dist.Work:
        return self._gather_all([self._parts(output) for output in outputs], inputs, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_all(self, outputs: list[Tensors], inputs: Tensors, result: Tensors | None = None) -> dist.Work:
        inner, seating = self._host.inner(self)
        works: list[dist.Work] = []
        endings: list[Callable[[], None]] = []
        for row, tensor in zip(outputs, inputs, strict=True):
            targets = [Movable(row[seat]) for seat in seating.seats()]
            source = Movable(tensor)
            if source.data.numel():
                works.append(inner.allgather([[target.data for target in targets]], [source.data]))
            endings.extend(target.finish for target in targets)
        return self._work(works, seating, result or [t for row in outputs for t in row], _all(endings))

    def gather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        opts = options_in(args, kwargs, dist.GatherOptions)
        tensor = inputs[0] if isinstance(inputs, list) else inputs
        inner, seating = self._host.inner(self)
        own = dist.GatherOptions()
        own.rootRank = seating.root(opts.rootRank)
        source = Movable(tensor)
        targets: list[Movable] = []
        if seating.own == own.rootRank:
            row = outputs[0] if outputs else []
            # A root that is gone asked for nothing: its stand-in receives into scratch.
            targets = [Movable(row[seat]) if row else Movable(torch.empty_like(tensor)) for seat in seating.seats()]
        lists = [[target.data for target in targets]] if targets else []
        works = [inner.gather(lists, [source.data], own)] if source.data.numel() else []
        return self._work(works, seating, [tensor], _all([target.finish for target in targets]))

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        """``output``: ``size()`` parts at the root, not looked at elsewhere. Called by torch 2.14 and later."""
        return self.gather([self._parts(output)] if output.numel() else [], [input], *args, **kwargs)

    def scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        opts = options_in(args, kwargs, dist.ScatterOptions)
        output = outputs[0] if isinstance(outputs, list) else outputs
        inner, seating = self._host.inner(self)
        root = seating.inner(opts.rootRank)
        if root is None:
            raise CommError(f"scatter in group {self.role!r}: its root, group rank {opts.rootRank}, is lost")
        own = dist.ScatterOptions()
        own.rootRank = root
        target = Movable(output)
        lists = []
        if seating.own == root:
            lists = [[Movable(inputs[0][seat]).data for seat in seating.seats()]]
        works = [inner.scatter([target.data], lists, own)] if target.data.numel() else []
        return self._work(works, seating, [output], target.finish)

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        tensors, opts = broadcast_in(tensors, args, kwargs)
        inner, seating = self._host.inner(self)
        own = dist.BroadcastOptions()
        own.rootRank = seating.root(opts.rootRank)
        item = Movable(tensors[0])
        works = [inner.broadcast([item.data], own)] if item.data.numel() else []
        return self._work(works, seating, tensors, item.finish)

    # -- all-to-all ---------------------------------------------------------

    def alltoall(self, outputs: Tensors, inputs: Tensors, *args: Any, **kwargs: Any) -> dist.Work:
        return self._exchange(list(outputs), list(inputs), list(outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        *args: Any,
        **kwargs: Any,
    ) -> dist.Work:
        """Splits count rows of dimension 0, one entry a group rank; empty: equal parts."""
        return self._exchange(self._rows(output, output_splits), self._rows(input, input_splits), [output])

    alltoall_base = all_to_all_single

    def _exchange(self, outputs: Tensors, inputs: Tensors, result: Tensors) -> dist.Work:
        """One gloo all-to-all over bytes: what goes to or comes from holes is left out."""
        inner, seating = self._host.inner(self)
        sources = [Movable(inputs[seat]) for seat in seating.seats()]
        targets = [Movable(outputs[seat]) for seat in seating.seats()]
        sent = torch.cat([source.data for source in sources])
        received = torch.empty(sum(target.data.numel() for target in targets), dtype=torch.uint8)
        out_splits = [target.data.numel() for target in targets]
        in_splits = [source.data.numel() for source in sources]
        works = [inner.alltoall_base(received, sent, out_splits, in_splits)]

        def finish() -> None:
            for target, piece in zip(targets, received.split(out_splits), strict=True):
                target.data.copy_(piece)
                target.finish()

        return self._work(works, seating, result, finish)

    # -- point to point -----------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        inner, seating = self._host.inner(self)
        item = Movable(tensor_list(tensors)[0])
        peer = self._peer(seating, dst)
        peers = (seating.living[peer],)
        return self._message(lambda: inner.send([item.data], peer, tag), seating, item, peers, None)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        inner, seating = self._host.inner(self)
        item = Movable(tensor_list(tensors)[0])
        peer = self._peer(seating, src)
        peers = (seating.living[peer],)
        return self._message(lambda: inner.recv([item.data], peer, tag), seating, item, peers, item.finish)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        inner, seating = self._host.inner(self)
        item = Movable(tensor_list(tensors)[0])
        begun: list[dist.Work] = []

        def begin() -> dist.Work:
            begun.append(inner.recv_anysource([item.data], tag))
            return begun[0]

        def source() -> int:
            return seating.seats()[begun[0].source_rank()]

        return self._message(begin, seating, item, _others(seating), item.finish, source)

    # -- synchronisation ----------------------------------------------------

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        inner, seating = self._host.inner(self)
        return self._work([inner.barrier()], seating, [], None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier; ``CommTimeout`` or ``PeerLost`` names the missing ranks."""
        self.barrier().wait(timeout or timedelta(seconds=self._seconds))

    def _start_coalescing(self, device: torch.device) -> None:
        """Operations between start and end run at once; the batch's work waits for the messages among them."""
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        batch, self._batch = self._batch or [], None
        return BatchedWork(batch)

    # -- helpers ------------------------------------------------------------

    def _parts(self, flat: torch.Tensor) -> Tensors:
        """``size()`` equal parts of a tensor, as views where it is contiguous."""
        return self._rows(flat, ())

    def _rows(self, tensor: torch.Tensor, splits: Sequence[int]) -> Tensors:
        if splits:
            return list(tensor.split(list(splits)))
        if not tensor.is_contiguous():
            return list(tensor.chunk(self.seating.size))
        if tensor.numel() % self.seating.size:
            raise ValueError(f"{tensor.numel()} elements do not divide by group size {self.seating.size}")
        return list(tensor.view(-1).view(self.seating.size, -1).unbind())

    def _peer(self, seating: Seating, group_rank: int) -> int:
        inner = seating.inner(group_rank)
        if inner is not None:
            return inner
        dead = group_rank
        if seating.slots is None:
            beyond = group_rank - (0 if seating.generation == 0 else len(seating.living))
            dead = self.members[beyond] if 0 <= beyond < len(self.members) else group_rank
        raise PeerLost(dead, f"not a living member of {self.role!r}")

    def _message(
        self,
        begin: Callable[[], dist.Work],
        seating: Seating,
        item: Movable,
        peers: tuple[int, ...],
        finish: Callable[[], None] | None,
        source: Callable[[], int] | None = None,
    ) -> GlooWork:
        """Begin a message. gloo refuses at once where the connection is closed already."""
        host = self._host
        try:
            works = [begin()] if item.data.numel() or source else []
        except RuntimeError as error:
            raise host.translate(error, peers, seating.generation, self._seconds) from error
        wait = host.waiters.await_message
        work = GlooWork(host, wait, works, peers, seating.generation, self._seconds, [item.tensor], finish, source)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _work(
        self, works: Sequence[dist.Work], seating: Seating, result: Tensors, finish: Callable[[], None] | None
    ) -> GlooWork:
        host, peers = self._host, _others(seating)
        return GlooWork(host, await_collective, works, peers, seating.generation, self._seconds, result, finish)


def _others(seating: Seating) -> tuple[int, ...]:
    return tuple(rank for rank in seating.living if rank != seating.living[seating.own])


def _taking(item: Reducible, output: torch.Tensor, start: int, stop: int) -> Callable[[], None]:
    def take() -> None:
        output.detach().copy_(item.reduced()[start:stop].view(output.shape))

    return take


def _finishing(items: Sequence[Reducible]) -> Callable[[], None]:
    return _all([item.finish for item in items])


def _all(actions: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def run() -> None:
        for action in actions:
            action()

    return run
