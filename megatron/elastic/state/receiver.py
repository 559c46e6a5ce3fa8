"""The receiving end of a transfer (:mod:`transfer`)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any

import torch

from megatron.elastic.state.block_copy import BlockCopy
from megatron.elastic.state.hashing import content_hash
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import GradientKey, StepRecord
from megatron.elastic.state.retained import Retained
from megatron.elastic.state.transfer import HEADER_BYTES, Channel, Header, TransferError

__all__ = ["BlockReceiver"]


class BlockReceiver:
    """Receives the copies of one :class:`BlockSender`. ``take()`` blocks on the channel; run it on its own thread.

    ``keep()`` is for the training thread: it ends the transfer at any instant, and no copy changes afterwards.
    """

    def __init__(self, pool: StatePool, channel: Channel, source: int) -> None:
        self._pool, self._channel, self.source = pool, channel, source
        self._memory: dict[BlockKey, torch.Tensor] = {}
        """Memory for blocks to come, with its pages already allocated."""
        self._unverified: dict[BlockKey, str] = {}
        """Expected hashes of received bases that are not verified yet."""
        self.blocks: dict[BlockKey, BlockCopy] = {}
        """Copies received so far, uncounted; ``commit`` moves them into the pool."""
        self._lock = threading.Lock()  # over the fields above, while a message is processed
        self._kept = False

    def take(self) -> bool:
        """Receive and process one message; returns False after the last, when :meth:`verify` is due.

        Raises :class:`TransferError`, ``CommError``.
        """
        raw = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._channel.recv(self.source, raw)
        header = Header.unpack(raw)
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
        """Allocate memory for these blocks. On any thread, while there is processor time."""
        for key in keys:
            if key not in self.blocks:
                self._memory[key] = torch.zeros((3, self._pool.block(key).numel), dtype=torch.float32)

    def _base(self, header: Header) -> None:
        block = self._pool.block(header.key)
        state = self._memory.pop(header.key, None)
        if state is None:
            state = torch.empty((3, block.numel), dtype=torch.float32)
        if header.length != state.numel():
            due = f"{header.length} elements, {state.numel()} due"
            raise TransferError(f"block {header.key} from rank {self.source}: {due}")
        self._channel.recv(self.source, state)
        copy = self._pool.shape(header.key, state, header.version, header.lineage)
        copy.origin = self.source if header.origin < 0 else header.origin
        with self._lock:
            self._check_open()
            self._unverified[header.key] = header.content
            self.blocks[header.key] = copy

    def verify(self) -> None:
        """Compare received bases with their hashes, before any of them is updated or counts.

        Raises :class:`TransferError`; a base that does not match is discarded.
        """
        with self._lock:
            self._check_open()
            self._verify()

    def keep(self, record: StepRecord) -> dict[BlockKey, BlockCopy]:
        """End the transfer at any point; return the copies that are whole, verified, and at ``record``'s version.

        A copy that is one step behind and has its gradient is updated. The others are discarded.
        """
        with self._lock:
            self._kept = True
            whole = {key: copy for key, copy in self.blocks.items() if key not in self._unverified}
            for copy in whole.values():
                ready = record.skipped or record.gradient in copy.gradients
                if copy.version == record.version - 1 and ready:
                    self._pool.replay(copy, record)
            return {key: copy for key, copy in whole.items() if copy.version == record.version}

    def _verify(self) -> None:
        while self._unverified:
            key, content = next(iter(self._unverified.items()))
            if content_hash(key, self.blocks[key].state) != content:
                del self.blocks[key], self._unverified[key]
                raise TransferError(f"block {key} from rank {self.source}: contents do not match their hash")
            del self._unverified[key]

    def _check_open(self) -> None:
        if self._kept:
            raise TransferError(f"the transfer from rank {self.source} was ended")

    def _ahead(self, header: Header) -> None:
        gradient, table = self._text(header)
        arrived = self._gradients(header, table)
        with self._lock:
            self._check_open()
            for copy, values in arrived:
                copy.gradients[GradientKey(*gradient)] = Retained(values)

    def _steps(self, header: Header) -> None:
        text, table = self._text(header)
        record = StepRecord.from_json(text)
        arrived = self._gradients(header, table)
        with self._lock:
            self._check_open()
            self._verify()
            for copy, values in arrived:
                if record.gradient is not None and values.numel():
                    copy.gradients[record.gradient] = Retained(values)
                self._pool.replay(copy, record)
                copy.spare.clear()  # a view of the whole message, which it would keep in memory

    def _text(self, header: Header) -> Any:
        raw = torch.empty(header.length, dtype=torch.uint8)
        self._channel.recv(self.source, raw)
        return json.loads(raw.numpy().tobytes())

    def _gradients(self, header: Header, table: list[list[int]]) -> list[tuple[BlockCopy, torch.Tensor]]:
        """Receive the gradients of the blocks of ``table``; a block's gradient may be empty."""
        arrived = []
        lengths = [max(0, length) for *_, length in table]
        gradients = torch.empty(sum(lengths), dtype=torch.float32)
        if gradients.numel():
            self._channel.recv(self.source, gradients)
        for (unit, shard, index, _), values in zip(table, gradients.split(lengths), strict=True):
            copy = self.blocks.get((unit, shard, index))
            if copy is None:
                block = (unit, shard, index)
                raise TransferError(f"block {block} from rank {self.source}: step {header.version} before its base")
            arrived.append((copy, values))
        return arrived

    def _end(self, version: int) -> None:
        behind = {key: copy.version for key, copy in self.blocks.items() if copy.version != version}
        if behind:
            raise TransferError(f"rank {self.source} ended at version {version}, but blocks are at {behind}")
