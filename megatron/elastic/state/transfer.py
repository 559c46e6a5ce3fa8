"""Adding a copy while everybody else trains: base, then log, then it counts.

Every change of placement is made of three transitions (DESIGN.md section 6). Two
need no bytes: *promote* changes only who is called owner, *drop* forgets. This
file has the third. To *add* a copy, a rank that has one (:class:`BlockSender`)
streams

    base    the block's state at the version v it has when its turn comes, copied at
            once, with its content hash;
    ahead   for every step after v, in one piece, the reduced gradients of all blocks whose base is
            over there, as soon as they are retained here: while the step is voted on, applied and
            gathered they travel, so that hardly anything is left to be sent at the boundary;
    steps   for every version after v, once: the StepRecord, with gradients that did not go ahead

and the new holder (:class:`BlockReceiver`) checks the hash, takes the base in
uncounted, and replays each step with the kernel everybody uses. A step that is computed again
replaces what went ahead; one that is skipped leaves it unused. At a boundary
:meth:`BlockSender.conclude` says at which version the transfer ends: what is left and that version
follow beside the next step, whose gradients go to the added copies in the ordinary way, once
:func:`commit` has made them count. The vote of that step names the new placement, and
:func:`prune` drops what it does not name. Should the generation end before anybody knows that vote,
the newest record still names the old placement (``StepRecord.placement``), and every old
copy is there, without a gradient of that step. Dropping before the vote instead has a
losing interleaving: ``tests/unit/protocol`` finds it.

Invariants
- A damaged copy is replaced in place: its drop and its add are one.
- No copy that the newest record names goes before a newer one does not name it.
- A block being added is not reported, voted on, or stepped by its rank's own
  ``apply`` until ``commit``; a base whose hash does not match never is.
- The sender holds one base, or ``memory_bytes`` of bases that it was asked to copy ahead
  (:meth:`BlockSender.prepare`), and at most ``memory_bytes`` of unsent gradients, ahead or not: when
  steps outrun the link, the last blocks taken up are given up and sent again
  later, so a slow receiver never stalls the step. The receiver holds one message (a base,
  or one step's gradients), and the gradients that came ahead.
- Messages of one transfer arrive in order; any loss ends the transfer with a
  ``CommError``, and what was not committed is dropped. Nothing needs undoing.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch

from megatron.elastic.state.hashing import content_hash
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.placement import Placement, Transition
from megatron.elastic.state.pool import BlockCopy, StateError, StatePool
from megatron.elastic.state.record import GradientKey, StepRecord

__all__ = ["BlockReceiver", "BlockSender", "Channel", "TransferError", "commit", "prune"]

HEADER_BYTES = 512
Kind = Literal["base", "ahead", "steps", "end"]
_WENT_AHEAD = -1
"""In place of a gradient's length: it is over there."""


class TransferError(RuntimeError):
    """A block could not be taken in; names block, source and reason."""


class Channel(Protocol):
    """Ordered, reliable messages between two ranks, implemented over the fabric's links."""

    def send(self, peer: int, payload: torch.Tensor) -> None:
        """Send a contiguous host tensor; it may be reused when this returns. Raises ``CommError``."""

    def recv(self, peer: int, out: torch.Tensor) -> None:
        """Receive the next message of ``peer`` into ``out``, of the sender's size. Raises ``CommError``."""


@dataclass(frozen=True)
class _Base:
    """A copy's state as it was at ``version``, and what its receiver is told of it."""

    version: int
    lineage: str
    content: str
    state: torch.Tensor


@dataclass(frozen=True)
class _Header:
    kind: Kind
    key: BlockKey = (0, 0, 0)
    version: int = 0
    """base: its version; ahead, steps: the version they lead to; end: the version everything sent has reached."""
    lineage: str = ""
    content: str = ""
    length: int = 0
    """base: elements; ahead, steps: bytes of the text that tells (the record and) which gradients follow."""

    def pack(self) -> torch.Tensor:
        values = [self.kind, *self.key, self.version, self.lineage, self.content, self.length]
        return _padded(json.dumps(values, separators=(",", ":")).encode(), HEADER_BYTES)

    @classmethod
    def unpack(cls, raw: torch.Tensor) -> _Header:
        kind, unit, shard, index, *rest = json.loads(raw.numpy().tobytes().rstrip(b"\0"))
        return cls(kind, (unit, shard, index), *rest)


def _padded(text: bytes, length: int) -> torch.Tensor:
    if len(text) > length:
        raise ValueError(f"message of {len(text)} bytes does not fit {length}")
    return torch.frombuffer(bytearray(text.ljust(length, b"\0")), dtype=torch.uint8)


_Gradient = torch.Tensor | int | None
"""Of one block for one step: to be sent with it, gone ahead (:data:`_WENT_AHEAD`), or none."""
_Step = tuple[StepRecord, _Gradient]
_Message = tuple[Any, ...]
"""A header, and the tensors that follow it."""


def _bytes_of(gradient: _Gradient) -> int:
    return 4 * gradient.numel() if isinstance(gradient, torch.Tensor) else 0


def _length_of(gradient: _Gradient) -> int:
    if isinstance(gradient, torch.Tensor):
        return gradient.numel()
    return 0 if gradient is None else gradient


class BlockSender:
    """Streams copies of this rank's blocks to ``peer``. See the module docstring.

    ``offer``, ``conclude`` and the pool belong to the training thread; ``pump`` may run on
    another. No lock is held while sending.
    """

    def __init__(self, pool: StatePool, channel: Channel, peer: int, memory_bytes: int) -> None:
        self._pool, self._channel, self.peer = pool, channel, peer
        self._memory = memory_bytes
        self._lock = threading.Lock()  # over the fields below, and while a block is stepped
        self._more = threading.Condition(self._lock)  # there may be something to send
        self._wire = threading.Lock()  # keeps header and payload together
        self._waiting: deque[BlockKey] = deque()
        self._logs: dict[BlockKey, deque[_Step]] = {}
        """Blocks whose base is sent → steps since then that are not."""
        self._ahead: dict[tuple[BlockKey, GradientKey], torch.Tensor] = {}
        """Gradients that are to go ahead of the vote on them."""
        self._went: dict[BlockKey, GradientKey] = {}
        """Those that went, or are to go, ahead for the next step of a block."""
        self._log_bytes = 0
        self._scratch = torch.empty(0)
        """Memory of the base that is sent; the processor would be given new pages for each otherwise."""
        self._prepared: dict[BlockKey, _Base] = {}
        self._last: int | None = None
        """Version that everything sent is to reach."""
        self.ended = False
        """Whether all is sent, and that it is."""
        self.restarts = 0
        self._remove: tuple[Callable[[], None], ...] = (
            pool.add_guard(self._around_change),
            pool.add_watcher(self._retained),
        )

    def offer(self, keys: Iterable[BlockKey]) -> None:
        """Queue copies of these blocks, which this rank must hold. Call at a boundary."""
        with self._lock:
            self._waiting.extend(keys)
            self._more.notify_all()

    def prepare(self) -> None:
        """Copy and hash bases that wait, within memory; who is not stepped before its turn goes as it is.

        On any thread, once, while there is processor time.
        """
        with self._lock:
            waiting = [self._pool.get(key) for key in self._waiting]
        ends = accumulate(copy.state.numel() for copy in waiting)
        copies = [copy for copy, end in zip(waiting, ends, strict=True) if 4 * end <= self._memory]
        sizes = [copy.state.numel() for copy in copies]
        for copy, into in zip(copies, torch.empty(sum(sizes)).split(sizes), strict=True):
            with self._lock:
                self._prepared[copy.block.key] = self._copied(copy, into)

    @property
    def pending(self) -> int:
        """Blocks whose base has not been sent yet."""
        with self._lock:
            return len(self._waiting)

    @property
    def pending_bytes(self) -> int:
        """Bytes of their state."""
        with self._lock:
            return sum(self._pool.get(key).state.nbytes for key in self._waiting)

    @property
    def log_bytes(self) -> int:
        """Memory held for gradients that are not sent yet."""
        with self._lock:
            return self._log_bytes

    @property
    def pressed(self) -> bool:
        """Whether half of the memory is taken: soon blocks would have to be given up."""
        return self.log_bytes > self._memory // 2

    def pump(self) -> bool:
        """Send gradients ahead, one version's steps (the oldest) or one base; False when there is nothing to send.

        With nothing left after :meth:`conclude` the receiver is told the version, and the transfer has ended.
        """
        with self._wire:
            with self._lock:
                message = self._next_ahead() or self._next_steps() or self._next_base()
                last = self._last
            if message is None and last is not None and not self.ended:
                self._channel.send(self.peer, _Header("end", version=last).pack())
                self.ended = True
            if message is not None:
                header, *payloads = message
                self._channel.send(self.peer, header.pack())
                for payload in payloads:
                    self._channel.send(self.peer, payload)
        return message is not None

    def conclude(self, version: int) -> None:
        """Follow the pool no further: all of it is at ``version`` and stays there until everything is sent."""
        with self._lock:
            self._last = version
            self._more.notify_all()

    def wait(self, seconds: float) -> None:
        """Until there may be something to send, at most ``seconds``. Beside :meth:`pump`, on its thread."""
        with self._lock:
            idle = not (self._ahead or self._waiting or any(self._logs.values())) and self._last is None
            if idle:
                self._more.wait(seconds)

    def finish(self, version: int) -> None:
        """:meth:`conclude`, and send all that is left."""
        self.conclude(version)
        while self.pump():
            pass
        self.close()

    def close(self) -> None:
        """Stop following the pool and forget what is unsent. Idempotent; on the training thread."""
        for remove in self._remove:
            remove()
        self._remove = ()
        with self._lock:
            self._waiting.clear()
            self._logs.clear()
            self._ahead.clear()
            self._went.clear()
            self._log_bytes = 0
            self._more.notify_all()

    # --- what to send next (lock held) ----------------------------------------------------------

    def _next_ahead(self) -> _Message | None:
        if not self._ahead:
            return None
        gradient = next(iter(self._ahead))[1]
        keys = sorted(key for key, of in self._ahead if of == gradient)
        tensors = {key: self._ahead.pop((key, gradient)) for key in keys}
        self._log_bytes -= sum(map(_bytes_of, tensors.values()))
        text = json.dumps([list(gradient), [[*key, tensor.numel()] for key, tensor in tensors.items()]]).encode()
        header = _Header("ahead", version=gradient.step + 1, length=len(text))
        return header, _padded(text, len(text)), torch.cat(list(tensors.values()))

    def _next_steps(self) -> _Message | None:
        version = min((log[0][0].version for log in self._logs.values() if log), default=None)
        if version is None:
            return None
        steps = {key: log.popleft() for key, log in sorted(self._logs.items()) if log and log[0][0].version == version}
        gradients = [gradient for _, gradient in steps.values() if isinstance(gradient, torch.Tensor)]
        self._log_bytes -= sum(map(_bytes_of, gradients))
        record = next(record for record, _ in steps.values())
        table = [[*key, _length_of(gradient)] for key, (_, gradient) in steps.items()]
        text = json.dumps([record.to_json(), table]).encode()
        header = _Header("steps", version=version, length=len(text))
        return (header, _padded(text, len(text)), *([torch.cat(gradients)] if gradients else []))

    def _next_base(self) -> _Message | None:
        if not self._waiting:
            return None
        key = self._waiting.popleft()
        copy = self._pool.get(key)
        self._logs[key] = deque()
        base = self._prepared.get(key)
        if base is None or base.version != copy.version:
            if self._scratch.numel() < copy.state.numel():
                self._scratch = torch.empty(copy.state.numel())
            base = self._copied(copy, self._scratch[: copy.state.numel()])
        return _Header("base", key, base.version, base.lineage, base.content, base.state.numel()), base.state

    def _copied(self, copy: BlockCopy, into: torch.Tensor) -> _Base:
        """The training thread, which may step the block, goes on as soon as the lock is released."""
        state = into.view_as(copy.state).copy_(copy.state)
        return _Base(copy.version, copy.lineage, content_hash(copy.block.key, state), state)

    # --- the pool moves on (training thread) ---------------------------------------------------

    def _retained(self, copy: BlockCopy, gradient: GradientKey) -> None:
        key = copy.block.key
        with self._lock:
            # Behind a step that has yet to be applied it would be too early: the log goes first.
            following = self._last is None and key in self._logs and self._pool.get(key) is copy
            if following and copy.version == gradient.step:
                self._forget_ahead(key, gradient.step)
                tensor = self._ahead[key, gradient] = copy.gradients[gradient].clone()
                self._went[key] = gradient
                self._log_bytes += _bytes_of(tensor)
                self._stay_within_memory()
                self._more.notify_all()

    def _forget_ahead(self, key: BlockKey, step: int | None = None) -> None:
        """Those of ``step`` not sent yet, or of all steps."""
        for queued in [q for q in self._ahead if q[0] == key and step in (None, q[1].step)]:
            self._log_bytes -= _bytes_of(self._ahead.pop(queued))

    @contextmanager
    def _around_change(self, copy: BlockCopy, record: StepRecord | None) -> Iterator[None]:
        key = copy.block.key
        with self._lock:
            known = not self.ended and (key in self._logs or key in self._waiting)
            if known and record is None:
                raise StateError(f"block {key} is dropped while it is streamed to rank {self.peer}")
            if self._last is None and record is not None and key in self._logs and self._pool.get(key) is copy:
                self._log(key, copy, record)
                self._more.notify_all()
            yield

    def _log(self, key: BlockKey, copy: BlockCopy, record: StepRecord) -> None:
        went, gradient = self._went.pop(key, None), record.gradient
        if record.skipped or gradient is None:
            self._logs[key].append((record, None))
        elif gradient not in copy.gradients:
            self._begin_again(key)  # ``state`` mode: a mirror has no gradients, the new state must be sent
        elif gradient == went:
            self._logs[key].append((record, _WENT_AHEAD))
        else:
            tensor = copy.gradients[gradient].clone()
            self._logs[key].append((record, tensor))
            self._log_bytes += _bytes_of(tensor)
            self._stay_within_memory()

    def _stay_within_memory(self) -> None:
        """Give up the blocks taken up last until within bounds; they start again from a later version."""
        while self._log_bytes > self._memory and self._logs:
            self._begin_again(next(reversed(self._logs)))

    def _begin_again(self, key: BlockKey) -> None:
        log = self._logs.pop(key)
        self._log_bytes -= sum(_bytes_of(gradient) for _, gradient in log)
        self._forget_ahead(key)
        self._went.pop(key, None)
        self._waiting.append(key)
        self.restarts += 1


class BlockReceiver:
    """Takes in what one :class:`BlockSender` streams. ``take()`` blocks on the channel; run it on its own thread."""

    def __init__(self, pool: StatePool, channel: Channel, source: int) -> None:
        self._pool, self._channel, self.source = pool, channel, source
        self._memory: dict[BlockKey, torch.Tensor] = {}
        """For the state of blocks to come; the kernel is done with its pages."""
        self._unverified: dict[BlockKey, str] = {}
        """Hashes that bases are to have which have come."""
        self.blocks: dict[BlockKey, BlockCopy] = {}
        """Copies received so far, uncounted; ``commit`` moves them into the pool."""
        self._ended_at: int | None = None

    @property
    def finished_at(self) -> int | None:
        """Version that everything has reached; none before all of it is here and compared with its hashes."""
        return None if self._unverified else self._ended_at

    def take(self) -> bool:
        """Receive and act on one message; False after the last: :meth:`verify` is due. Raises :class:`TransferError`,
        ``CommError``."""
        raw = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._channel.recv(self.source, raw)
        header = _Header.unpack(raw)
        if header.kind == "base":
            self._base(header)
        elif header.kind == "ahead":
            self._ahead(header)
        elif header.kind == "steps":
            self._steps(header)
        else:
            self._end(header.version)
            return False
        return True

    def prepare(self, keys: Iterable[BlockKey]) -> None:
        """Have memory for these blocks. On any thread, while there is processor time."""
        for key in keys:
            if key not in self.blocks:
                self._memory[key] = torch.zeros((3, self._pool.block(key).numel), dtype=torch.float32)

    def _base(self, header: _Header) -> None:
        block = self._pool.block(header.key)
        state = self._memory.pop(header.key, None)
        if state is None:
            state = torch.empty((3, block.numel), dtype=torch.float32)
        if header.length != state.numel():
            due = f"{header.length} elements, {state.numel()} due"
            raise TransferError(f"block {header.key} from rank {self.source}: {due}")
        self._channel.recv(self.source, state)
        self._unverified[header.key] = header.content
        self.blocks[header.key] = self._pool.shape(header.key, state, header.version, header.lineage)

    def verify(self) -> None:
        """Compare what has come with its hashes, before any of it is stepped or counts.

        Raises :class:`TransferError`; what does not match is not kept.
        """
        while self._unverified:
            key, content = next(iter(self._unverified.items()))
            if content_hash(key, self.blocks[key].state) != content:
                del self.blocks[key]
                raise TransferError(f"block {key} from rank {self.source}: contents do not match their hash")
            del self._unverified[key]

    def _ahead(self, header: _Header) -> None:
        gradient, table = self._text(header)
        for copy, values in self._gradients(header, table):
            copy.gradients[GradientKey(*gradient)] = values

    def _steps(self, header: _Header) -> None:
        self.verify()
        text, table = self._text(header)
        record = StepRecord.from_json(text)
        for copy, values in self._gradients(header, table):
            if record.gradient is not None and values.numel():
                copy.gradients[record.gradient] = values
            self._pool.replay(copy, record)
            copy.spare.clear()  # a part of what came: kept, it would keep all of it

    def _text(self, header: _Header) -> Any:
        raw = torch.empty(header.length, dtype=torch.uint8)
        self._channel.recv(self.source, raw)
        return json.loads(raw.numpy().tobytes())

    def _gradients(self, header: _Header, table: list[list[int]]) -> Iterator[tuple[BlockCopy, torch.Tensor]]:
        """The blocks of ``table`` and what follows for each, possibly nothing."""
        lengths = [max(0, length) for *_, length in table]
        gradients = torch.empty(sum(lengths), dtype=torch.float32)
        if gradients.numel():
            self._channel.recv(self.source, gradients)
        for (unit, shard, index, _), values in zip(table, gradients.split(lengths), strict=True):
            copy = self.blocks.get((unit, shard, index))
            if copy is None:
                block = (unit, shard, index)
                raise TransferError(f"block {block} from rank {self.source}: step {header.version} before its base")
            yield copy, values

    def _end(self, version: int) -> None:
        behind = {key: copy.version for key, copy in self.blocks.items() if copy.version != version}
        if behind:
            raise TransferError(f"rank {self.source} ended at version {version}, but blocks are at {behind}")
        self._ended_at = version


def commit(
    pool: StatePool, transitions: Iterable[Transition], received: Mapping[BlockKey, BlockCopy], version: int
) -> None:
    """Count this rank's added copies, all of the state at ``version``.

    Raises :class:`StateError` before anything changes when a copy to be added is not
    there or not at ``version``.
    """
    added = [change.block for change in transitions if change.kind == "add" and change.rank == pool.rank]
    for key in added:
        copy = received.get(key)
        if copy is None or copy.version != version:
            at = "missing" if copy is None else f"at version {copy.version}"
            raise StateError(f"rank {pool.rank}: block {key} to be added is {at}, the state at {version}")
    for key in added:
        pool.take_in(received[key])


def prune(pool: StatePool, *placements: Placement) -> dict[BlockKey, BlockCopy]:
    """Drop copies that none of ``placements`` gives this rank; with the vote or the decision known that says so.

    Returns what went, whose memory the caller may hand back when there is time for it.
    """
    kept = [placement.copies for placement in placements]
    gone = [key for key in pool if not any(key in copies and pool.rank in copies[key].ranks for copies in kept)]
    dropped = {key: pool.get(key) for key in gone}
    for key in gone:
        pool.drop(key)
    return dropped
