"""The sending end of a transfer: bases, gradients ahead, steps (:mod:`transfer`)."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from megatron.elastic.platform.threads import OS_THREADS, Threads
from megatron.elastic.state.block_copy import BlockCopy
from megatron.elastic.state.hashing import content_hash
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.pool import StateError, StatePool
from megatron.elastic.state.record import GradientKey, StepRecord
from megatron.elastic.state.transfer import WENT_AHEAD, Channel, Header, padded

__all__ = ["BlockSender"]

_Gradient = torch.Tensor | int | None
"""Gradient of one block for one step: to be sent, already sent ahead (:data:`WENT_AHEAD`), or none."""
_Step = tuple[StepRecord, _Gradient]
_Message = tuple[Any, ...]
"""A header, and the tensors that follow it."""


def _bytes_of(gradient: _Gradient) -> int:
    return 4 * gradient.numel() if isinstance(gradient, torch.Tensor) else 0


def _length_of(gradient: _Gradient) -> int:
    if isinstance(gradient, torch.Tensor):
        return gradient.numel()
    return 0 if gradient is None else gradient


@dataclass(frozen=True)
class _Base:
    """A copy's state at ``version``, with its lineage and content hash."""

    version: int
    lineage: str
    content: str
    state: torch.Tensor


class BlockSender:
    """Streams copies of this rank's blocks to ``peer`` (:mod:`transfer`).

    ``offer``, ``conclude`` and the pool are for the training thread; ``pump`` may run on
    another. No lock is held while sending.
    """

    def __init__(
        self, pool: StatePool, channel: Channel, peer: int, memory_bytes: int, threads: Threads = OS_THREADS
    ) -> None:
        self._pool, self._channel, self.peer = pool, channel, peer
        self._memory = memory_bytes
        self._lock = threading.Lock()  # over the fields below, and while a block is updated
        self._more = threads.condition(self._lock)  # notified when there may be a message to send
        self._wire = threading.Lock()  # keeps header and payload together
        self._waiting: deque[BlockKey] = deque()
        self._logs: dict[BlockKey, deque[_Step]] = {}
        """Blocks whose base is sent → their unsent steps since then."""
        self._ahead: dict[tuple[BlockKey, GradientKey], torch.Tensor] = {}
        """Gradients to be sent ahead of the vote on them."""
        self._went: dict[BlockKey, GradientKey] = {}
        """Block → gradient of its next step that is sent, or will be sent, ahead."""
        self._log_bytes = 0
        self._scratch = torch.empty(0)
        """Memory of the base being sent, reused so that the kernel does not allocate pages for each base."""
        self._prepared: dict[BlockKey, _Base] = {}
        self._for_bases = torch.empty(0)
        """Memory of :meth:`prepare`, if it was allocated before."""
        self._last: int | None = None
        """Version at which the transfer is to end, once known."""
        self.ended = False
        """True if everything is sent, including the message of the end."""
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
        """Copy and hash waiting bases, within the memory limit.

        A base whose block changes before it is sent is copied anew. On any thread, once, while there is processor time.
        """
        copies = self._first()
        sizes = [copy.made.state.numel() for copy in copies]
        memory = self._for_bases if self._for_bases.numel() == sum(sizes) else torch.empty(sum(sizes))
        for copy, into in zip(copies, memory.split(sizes), strict=True):
            with self._lock:
                self._prepared[copy.block.key] = self._copied(copy, into)

    def allocate(self) -> None:
        """Allocate and write the memory of :meth:`prepare`, which then only copies. On any thread, before it."""
        self._for_bases = torch.zeros(sum(copy.made.state.numel() for copy in self._first()))

    def _first(self) -> list[BlockCopy]:
        """Return the waiting copies whose bases fit the memory limit together."""
        with self._lock:
            waiting = [self._pool.get(key) for key in self._waiting]
        ends = accumulate(copy.made.state.numel() for copy in waiting)
        return [copy for copy, end in zip(waiting, ends, strict=True) if 4 * end <= self._memory]

    @property
    def pending(self) -> int:
        """Number of blocks whose base has not been sent yet."""
        with self._lock:
            return len(self._waiting)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the bases that have not been sent yet."""
        with self._lock:
            return sum(self._pool.get(key).made.state.nbytes for key in self._waiting)

    @property
    def log_bytes(self) -> int:
        """Bytes of gradients that have not been sent yet."""
        with self._lock:
            return self._log_bytes

    @property
    def pressed(self) -> bool:
        """True if half of the memory limit is used, beyond which blocks would have to be sent anew."""
        return self.log_bytes > self._memory // 2

    def pump(self) -> bool:
        """Send gradients ahead, one version's steps (the oldest) or one base; return False if no message is due.

        When all is sent after :meth:`conclude`, it sends the final version, and the transfer has ended.
        """
        with self._wire:
            with self._lock:
                message = self._next_ahead() or self._next_steps() or self._next_base()
                last = self._last
            if message is None and last is not None and not self.ended:
                self._channel.send(self.peer, Header("end", version=last).pack())
                self.ended = True
            if message is not None:
                header, *payloads = message
                self._channel.send(self.peer, header.pack())
                for payload in payloads:
                    self._channel.send(self.peer, payload)
        return message is not None

    def conclude(self, version: int) -> None:
        """Stop following the pool: all copies are at ``version`` and stay there until everything is sent."""
        with self._lock:
            self._last = version
            self._more.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until there may be a message to send, at most ``seconds``; on the thread of :meth:`pump`."""
        with self._lock:
            idle = not (self._ahead or self._waiting or any(self._logs.values())) and self._last is None
            if idle:
                self._more.wait(seconds)

    def finish(self, version: int) -> None:
        """Conclude at ``version`` and send everything that is left."""
        self.conclude(version)
        while self.pump():
            pass
        self.close()

    def close(self) -> None:
        """Stop following the pool and discard unsent messages. Idempotent; on the training thread."""
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

    # --- next message (lock held) ---------------------------------------------------------------

    def _next_ahead(self) -> _Message | None:
        if not self._ahead:
            return None
        gradient = next(iter(self._ahead))[1]
        keys = sorted(key for key, of in self._ahead if of == gradient)
        tensors = {key: self._ahead.pop((key, gradient)) for key in keys}
        self._log_bytes -= sum(map(_bytes_of, tensors.values()))
        text = json.dumps([list(gradient), [[*key, tensor.numel()] for key, tensor in tensors.items()]]).encode()
        header = Header("ahead", version=gradient.step + 1, length=len(text))
        return header, padded(text, len(text)), torch.cat(list(tensors.values()))

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
        header = Header("steps", version=version, length=len(text))
        return (header, padded(text, len(text)), *([torch.cat(gradients)] if gradients else []))

    def _next_base(self) -> _Message | None:
        if not self._waiting:
            return None
        key = self._waiting.popleft()
        copy = self._pool.get(key)
        self._logs[key] = deque()
        base = self._prepared.get(key)
        if base is None or base.version != copy.version:
            if self._scratch.numel() < copy.made.state.numel():
                self._scratch = torch.empty(copy.made.state.numel())
            base = self._copied(copy, self._scratch[: copy.made.state.numel()])
        header = Header("base", key, base.version, base.lineage, base.content, copy.origin, base.state.numel())
        return header, base.state

    def _copied(self, copy: BlockCopy, into: torch.Tensor) -> _Base:
        """Copy and hash a base. The training thread may update the block once the lock is released."""
        state = into.view_as(copy.made.state).copy_(copy.made.on_host())
        return _Base(copy.version, copy.lineage, content_hash(copy.block.key, state), state)

    # --- the pool moves on (training thread) ---------------------------------------------------

    def _retained(self, copy: BlockCopy, gradient: GradientKey) -> None:
        key = copy.block.key
        with self._lock:
            # If the copy has yet to apply an earlier step, that step's log must be sent first.
            following = self._last is None and key in self._logs and self._pool.get(key) is copy
            if following and copy.version == gradient.step:
                self._forget_ahead(key, gradient.step)
                tensor = self._ahead[key, gradient] = copy.host_gradient(gradient).clone()
                self._went[key] = gradient
                self._log_bytes += _bytes_of(tensor)
                self._stay_within_memory()
                self._more.notify_all()

    def _forget_ahead(self, key: BlockKey, step: int | None = None) -> None:
        """Discard unsent gradients of ``step``, or of all steps."""
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
            self._begin_again(key)  # ``state`` mode: a mirror has no gradients, so the new state must be sent
        elif gradient == went:
            self._logs[key].append((record, WENT_AHEAD))
        else:
            tensor = copy.host_gradient(gradient).clone()
            self._logs[key].append((record, tensor))
            self._log_bytes += _bytes_of(tensor)
            self._stay_within_memory()

    def _stay_within_memory(self) -> None:
        """Discard the logs of the newest blocks until within the limit; those are sent anew from a later version."""
        while self._log_bytes > self._memory and self._logs:
            self._begin_again(next(reversed(self._logs)))

    def _begin_again(self, key: BlockKey) -> None:
        log = self._logs.pop(key)
        self._log_bytes -= sum(_bytes_of(gradient) for _, gradient in log)
        self._forget_ahead(key)
        self._went.pop(key, None)
        self._waiting.append(key)
        self.restarts += 1
