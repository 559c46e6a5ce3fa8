"""The state pool: this rank's copies of state blocks.

Owned and mirrored blocks are stored alike: master, exp_avg, exp_avg_sq (fp32), a version, and up to two retained
reduced gradients keyed (step, generation, attempt). The method :meth:`StatePool.apply` brings copies to the version of
a StepRecord, each where it lies (:mod:`place`), with the same bits on owner and mirror. This is the snapshot pool of
ElasWave (arXiv 2510.00606) in its "gradient" mode (docs/design.md §3, §6).

Invariants
- A gradient is dropped only when its copy has applied it, or when a decision
  named another key (:meth:`discard`). A third one is refused: this is the
  back-pressure.
- ``apply`` is atomic per block and idempotent: a block at the record's version or
  beyond is not changed; a block whose update was interrupted is *torn* and counts as
  no copy.
- A mirror may accept an update and make it with the next one (:mod:`block_copy`), but not while a guard is
  on the pool. So other threads never make updates.
- A copy being added does not count until :meth:`admit`.
- A retained gradient has its host form (:meth:`BlockCopy.host_gradient`) from its arrival on, whatever the place of
  its copy: mirrors, hashes and norms need it there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Literal

import torch

from megatron.elastic.state.block_copy import SLOTS, TOGETHER, TORN, BlockCopy
from megatron.elastic.state.hashing import content_hash, next_lineage
from megatron.elastic.state.layout import BlockKey, StateBlock, UnitLayout
from megatron.elastic.state.notes import Notes
from megatron.elastic.state.place import HOST, BlockStore, Place, StagedTensor, read_together
from megatron.elastic.state.placement import Placement
from megatron.elastic.state.protocol import NOTHING, Holdings
from megatron.elastic.state.record import GradientKey, Hyper, StepRecord
from megatron.elastic.state.retained import Lender, Lent, Part, Retained
from megatron.elastic.state.step_scalars import StepScalars

__all__ = ["StateError", "StatePool"]


_UNGUARDED = nullcontext()


class StateError(RuntimeError):
    """An operation that would break an invariant of the state; names block, version and rank."""


Guard = Callable[[BlockCopy, StepRecord | None], AbstractContextManager[None]]
Watcher = Callable[[BlockCopy, GradientKey], None]


class StatePool:
    """The copies of one rank (module docstring). ``layouts`` must cover every (unit, shard) that it may hold.

    ``owners``: the place of owned blocks; one that it comes to own is elsewhere until it has moved (:mod:`relocation`).
    """

    def __init__(
        self,
        rank: int,
        layouts: Mapping[tuple[int, int], UnitLayout],
        hyper: Hyper,
        snapshot: Literal["gradient", "state"] = "gradient",
        owners: Place = HOST,
    ) -> None:
        self.rank = rank
        self.owners = owners
        self.hyper = hyper
        self.snapshot = snapshot
        self.records: dict[int, StepRecord] = {}
        self.notes = Notes()
        self._layouts = dict(layouts)
        self._copies: dict[BlockKey, BlockCopy] = {}
        self._guards: list[Guard] = []
        self._watchers: list[Watcher] = []
        self._condemned: set[BlockKey] = set()
        self._scalars: StepScalars | None = None
        """Those of the newest record that was applied."""

    # --- which blocks -------------------------------------------------------------------------

    def layout(self, unit: int, shard: int) -> UnitLayout:
        """Return the layout of (unit, shard). Raises ``KeyError``."""
        return self._layouts[unit, shard]

    def block(self, key: BlockKey) -> StateBlock:
        """Return the block named ``key``. Raises ``KeyError``."""
        return self._layouts[key[0], key[1]].blocks[key[2]]

    def shape(self, key: BlockKey, state: torch.Tensor, version: int, lineage: str = "") -> BlockCopy:
        """Return a copy made of ``state`` (host, fp32 [3, numel], not cloned), not yet in the pool."""
        return self._shaped(key, BlockStore(HOST, state), version, lineage)

    def _shaped(self, key: BlockKey, store: BlockStore, version: int, lineage: str) -> BlockCopy:
        layout, block = self._layouts[key[0], key[1]], self.block(key)
        return BlockCopy(
            block, layout.runs(block), store, version, lineage=lineage or content_hash(key, store.on_host())
        )

    def take_in(self, copy: BlockCopy) -> None:
        """Add a complete copy to the pool; it counts from now on."""
        self._copies[copy.block.key] = copy

    def put(
        self,
        key: BlockKey,
        master: torch.Tensor,
        version: int,
        exp_avg: torch.Tensor | None = None,
        exp_avg_sq: torch.Tensor | None = None,
        counted: bool = True,
        place: Place = HOST,
    ) -> BlockCopy:
        """Add a copy at ``place`` (values are cloned; moments default to zero).

        ``counted=False`` while it is being added.
        """
        state = place.empty(3, self.block(key).numel)
        for row, values in zip(state, (master, exp_avg, exp_avg_sq), strict=True):
            row.zero_() if values is None else row.copy_(values)
        copy = self._copies[key] = self._shaped(key, BlockStore(place, state), version, "")
        copy.counted = counted
        return copy

    def admit(self, key: BlockKey) -> None:
        """Count an added copy from now on (its hash has matched)."""
        self._copies[key].counted = True

    def drop(self, key: BlockKey) -> None:
        """Forget a copy and its gradients."""
        with self._guarded(self._copies[key], None):
            del self._copies[key]

    def condemn(self, key: BlockKey) -> None:
        """Forget a copy whose contents are wrong. It is reported as torn until :meth:`forget_torn`."""
        self.drop(key)
        self._condemned.add(key)

    def forget_origins(self, keys: Iterable[BlockKey]) -> None:
        """Note that the contents of the copies of ``keys`` have been compared (:attr:`BlockCopy.origin`)."""
        for key in keys:
            self.get(key).origin = -1

    def doubt(self, keys: Iterable[BlockKey], owner: int) -> None:
        """Note that the copies of ``keys`` have other contents than those of their owner; -1: no longer."""
        for key in keys:
            self.get(key).doubted_by = owner

    def doubts(self) -> dict[BlockKey, int]:
        """Return block → owner, of the copies whose contents differ from the owner's as far as this rank knows."""
        return {key: copy.doubted_by for key, copy in self._copies.items() if copy.doubted_by >= 0}

    def forget_torn(self) -> None:
        """Stop reporting condemned copies, which the placement in force no longer names."""
        self._condemned.clear()

    def get(self, key: BlockKey) -> BlockCopy:
        """Return the copy of ``key``. Raises :class:`StateError` if this rank has none."""
        copy = self._copies.get(key)
        if copy is None:
            raise StateError(f"rank {self.rank} has no copy of block {key}")
        return copy

    def read(self, keys: Iterable[BlockKey]) -> list[torch.Tensor]:
        """Return the numbers of copies, fp32 [3, numel] each, in host memory, only to be read."""
        return read_together([self.get(key).store for key in keys])

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._copies

    def __iter__(self) -> Iterator[BlockKey]:
        """Iterate over all held blocks, ascending, including those being added."""
        return iter(sorted(self._copies))

    def oldest(self) -> int:
        """Return the lowest version of the copies that count; :data:`NOTHING` without any."""
        return min((copy.version for copy in self._copies.values() if copy.counted), default=NOTHING)

    def bytes_held(self) -> int:
        """Return the bytes of states, of previous states (``state`` mode) and of gradient buffers."""
        return sum(copy.bytes_held() for copy in self._copies.values())

    def flip_bit(self, key: BlockKey, tensor: str) -> None:
        """Flip one bit of a copy, as failing memory would (fault injection)."""
        values: torch.Tensor = getattr(self.get(key), tensor)
        values.view(torch.int32)[values.numel() // 2] ^= 1 << 20

    # --- gradients ----------------------------------------------------------------------------

    def retain(self, key: BlockKey, gradient: GradientKey, values: torch.Tensor, lent: Lent | None = None) -> None:
        """Keep the reduced gradient (fp32 [numel]) of one block until it is applied.

        It is cloned, into the memory ``lent`` if there is any; ``values`` may be there already.
        It replaces a gradient of an older attempt at the same step. Raises :class:`StateError`
        for an older attempt or step, and if both slots are taken.
        """
        copy = self._slot_for(key, gradient)
        if copy.place.on_device:
            on_host = values.to("cpu", copy=True)
            copy.gradients[gradient] = Retained(copy.place.bring(on_host), StagedTensor(on_host))
            if lent is not None:
                lent.give_back()
        else:
            copy.keep(gradient, values, lent)
        self._retained(copy, gradient)

    def retain_all(
        self, gradient: GradientKey, values: Mapping[BlockKey, torch.Tensor], lender: Lender | None = None
    ) -> None:
        """Keep the reduced gradients of several blocks, as :meth:`retain` does, where ``lender`` has room for them.

        Those of a device go to the owners' place in one piece. Where that is the device, they are kept there, and
        begin to leave for host memory in one piece.
        """
        if not values:
            return
        if not self.owners.on_device and all(part.is_cpu for part in values.values()):
            for key, part in values.items():
                self.retain(key, gradient, part, None if lender is None else lender.room(key))
            return
        whole = self.owners.bring(torch.cat(list(values.values())))
        staged, start = self.owners.stage(whole), 0
        for key, part in values.items():
            stop = start + part.numel()
            copy = self._slot_for(key, gradient)
            copy.gradients[gradient] = Retained(whole[start:stop], Part(staged, start, stop))
            self._retained(copy, gradient)
            start = stop

    def _slot_for(self, key: BlockKey, gradient: GradientKey) -> BlockCopy:
        """Return the copy that may keep ``gradient``, without the one that it replaces. Raises :class:`StateError`."""
        copy = self.get(key)
        if copy.version == TORN or gradient.step < copy.version:
            raise StateError(f"rank {self.rank}: gradient {tuple(gradient)} for block {key} at version {copy.version}")
        if copy.gradients:
            self._make_room(copy, gradient)
        return copy

    def _make_room(self, copy: BlockCopy, gradient: GradientKey) -> None:
        for held in [k for k in copy.gradients if k.step == gradient.step]:
            if held > gradient:
                name = f"gradient {tuple(gradient)} of block {copy.block.key}"
                raise StateError(f"rank {self.rank}: {name} is void, holds {held}")
            copy.release(held)
        if len(copy.gradients) >= SLOTS:
            slots = [tuple(k) for k in sorted(copy.gradients)]
            raise StateError(f"rank {self.rank}: both gradient slots of block {copy.block.key} are taken: {slots}")

    def _retained(self, copy: BlockCopy, gradient: GradientKey) -> None:
        self.notes.retained(len(copy.gradients))
        for watcher in self._watchers:
            watcher(copy, gradient)

    def norm_sq(self, key: BlockKey, gradient: GradientKey) -> float:
        """Return the sum of squares of the raw retained gradient, fp64 in a fixed order.

        It is finite exactly if all elements are.
        """
        copy = self.get(key)
        if gradient not in copy.gradients:
            raise StateError(f"rank {self.rank}: block {key} has no gradient {tuple(gradient)}")
        return copy.gradients[gradient].squares()

    def found_nonfinite(self, gradient: GradientKey, keys: Iterable[BlockKey]) -> bool:
        """Return whether any of the blocks' retained gradients has an infinity or NaN."""
        return not all(math.isfinite(self.norm_sq(key, gradient)) for key in keys)

    def discard(self, keep: GradientKey | None, step: int) -> None:
        """Drop gradients of ``step`` and later under any key except ``keep``: only the decision's key is valid."""
        for copy in self._copies.values():
            for key in [k for k in copy.gradients if k.step >= step and k != keep]:
                copy.release(key)

    # --- versions -----------------------------------------------------------------------------

    def start(self, record: StepRecord) -> None:
        """Begin with the record of the state just loaded or initialised."""
        self.records = {record.version: record}

    def apply(
        self, record: StepRecord, keys: Collection[BlockKey] | None = None, unread: Collection[BlockKey] = ()
    ) -> tuple[BlockKey, ...]:
        """Bring copies (all, or ``keys``) to ``record.version``; returns the updated ones, ascending.

        ``unread``: blocks whose numbers nothing is to read, as a rule. Their updates may wait for the next one.

        Idempotent. Raises :class:`StateError` if a copy is neither at the version nor one step before it
        with the gradient that the record names; copies earlier in the order are then already updated.
        """
        self.remember(record)
        if self._scalars is None or self._scalars.record is not record:
            self._scalars = StepScalars(record, self.hyper)
        by, moved, last = self._scalars, [], None
        for key in sorted(self._copies if keys is None else keys):
            copy = self.get(key)
            if copy.version < record.version:
                gradient = self._step(copy, by, waits=key in unread)
                if gradient is not None and gradient is not last:  # one key for all, as a rule
                    self.notes.applied(record.version, gradient)
                    last = gradient
                moved.append(key)
        return tuple(moved)

    def replay(self, copy: BlockCopy, record: StepRecord) -> None:
        """Update a copy outside the pool (one being added) by ``record``, with a gradient that it retains."""
        self._step(copy, StepScalars(record, self.hyper))

    def adopt(self, key: BlockKey, state: torch.Tensor, record: StepRecord, lineage: str) -> None:
        """Take the owner's updated block (fp32 [3, numel], cloned) instead of replaying; ``state`` mode only."""
        copy = self.get(key)
        if self.snapshot != "state" or copy.version not in (record.version - 1, record.version):
            raise StateError(f"rank {self.rank}: block {key} at {copy.version} cannot adopt version {record.version}")
        with self._guarded(copy, record):
            if copy.version < record.version:
                self._keep_previous(copy)
            copy.version = TORN
            copy.state.copy_(state)
            copy.version, copy.lineage = record.version, lineage
        for gradient in [k for k in copy.gradients if k.step < record.version]:
            copy.release(gradient)

    def revert(self, record: StepRecord) -> None:
        """Bring copies beyond ``record``'s version back to it, at most one step. ``state`` mode only.

        ``record`` replaces the held record of that version; later ones are discarded. A copy at an earlier version
        stays there: it retains the gradient of the step between, or its owner sends the stepped block.
        """
        version = record.version
        for key in self:
            copy = self.get(key)
            if TORN < copy.version <= version:
                continue
            if copy.previous is None or copy.previous[0] != version:
                raise StateError(f"rank {self.rank}: block {key} at {copy.version} cannot go back to {version}")
            _, copy.store, copy.lineage = copy.previous
            copy.version, copy.previous = version, None
        self.records = {v: held for v, held in self.records.items() if v < version} | {version: record}

    @staticmethod
    def _keep_previous(copy: BlockCopy) -> None:
        """Keep the copy as it is, for ``state`` mode."""
        copy.previous = (copy.version, copy.store.clone(), copy.lineage)

    def remember(self, record: StepRecord) -> None:
        """Hold a record as soon as the vote is known: from now on the step is committed."""
        held = self.records.get(record.version)
        if held is record:
            return
        if held is not None and held != record:
            raise StateError(f"rank {self.rank}: another record of version {record.version} is held")
        self.records[record.version] = record
        for version in [v for v in self.records if v < record.version - 1]:
            del self.records[version]

    @staticmethod
    def _leading_to(copy: BlockCopy, record: StepRecord) -> GradientKey | None:
        """Return the key of the retained gradient that brings ``copy`` to ``record``; None if there is none."""
        return record.gradient if record.gradient in copy.gradients else None

    def _step(self, copy: BlockCopy, by: StepScalars, waits: bool = False) -> GradientKey | None:
        """Bring ``copy`` to the record of ``by``; return the key of the gradient that it was updated by, if any."""
        record = by.record
        if copy.version != record.version - 1:
            raise StateError(f"{self._named(copy)} cannot reach version {record.version}")
        gradient = None if record.skipped else self._leading_to(copy, record)
        if gradient is None and not record.skipped:
            raise StateError(f"{self._named(copy)} lacks gradient {record.gradient and tuple(record.gradient)}")
        with self._guarded(copy, record):
            if self.snapshot == "state":
                self._keep_previous(copy)
            content = "" if gradient is None else copy.gradient_hash(gradient)
            copy.lineage = next_lineage(copy.lineage, content, record.digest)
            copy.version = record.version
            waits = waits and not self._guards and record.version % TOGETHER > 0
            if gradient is None:
                if not waits:
                    copy.catch_up()
            elif waits:
                copy.accept(gradient, [by.of(run) for run in copy.runs])
            else:
                copy.update(gradient, [by.of(run) for run in copy.runs])
        if copy.gradients:
            for key in [k for k in copy.gradients if k.step < record.version]:
                copy.release(key)
        return gradient

    def _named(self, copy: BlockCopy) -> str:
        return f"rank {self.rank}: block {copy.block.key} at version {copy.version}"

    # --- reports and views --------------------------------------------------------------------

    def holdings(
        self,
        statistics: Mapping[GradientKey, Iterable[tuple[int, int]]] | None = None,
        named: Placement | None = None,
        voting: Placement | None = None,
    ) -> Holdings:
        """Return the holdings of this rank's report. ``statistics``: rows whose tokens and losses it knows, by key.

        ``named``: placement of its newest record; this rank offers its further copies. ``voting``: placement that the
        vote under way is to name; the copies that it names need its gradients (None: all copies).
        """
        counted = [c for c in self._copies.values() if c.counted]
        whole = [c for c in counted if c.version != TORN]
        versions = [c.version for c in whole] or [NOTHING]
        # A rank without copies that need a gradient is ready to vote as soon as it knows its statistics.
        keys = {key for c in whole for key in c.gradients} | set(statistics or ())
        spans = tuple((key, tuple(sorted(rows))) for key, rows in sorted((statistics or {}).items()))
        torn = tuple(sorted({c.block.key for c in counted if c.version == TORN} | self._condemned))
        here = [c.block.key for c in whole]
        due = here if voting is None else [k for k in voting.held_by(self.rank) if k not in torn]
        known = max(self.records, default=NOTHING)
        complete = [k for k in sorted(keys) if self._retains(k, due if k.step >= known else here)]
        records = tuple(self.records[v] for v in sorted(self.records))
        floors = [c.version if c.previous is None else c.previous[0] for c in whole] or [NOTHING]
        floor = max(floors) if self.snapshot == "state" else None
        # An offered copy must retain all reported gradients, since recovery treats it like the rank's other copies.
        more = [] if named is None else [k for k in sorted(here) if self.rank not in named.copies[k].ranks]
        offered = tuple(k for k in more if all(self._retains(gradient, (k,)) for gradient in complete))
        return Holdings(min(versions), max(versions), tuple(complete), records, spans, torn, floor, offered)

    def _retains(self, gradient: GradientKey, keys: Iterable[BlockKey]) -> bool:
        """Return whether this rank has all of ``keys``, each beyond that step or with its gradient."""
        copies = (self._copies.get(key) for key in keys)
        return all(c is not None and (c.version > gradient.step or gradient in c.gradients) for c in copies)

    def add_guard(self, guard: Guard) -> Callable[[], None]:
        """Run every change of a copy inside ``guard(copy, record)``, a context manager.

        It is entered before the copy is brought to ``record.version`` (its gradient is still
        retained) or, with ``None``, before it is dropped. Returns a function that removes the guard.
        On the training thread.
        """
        for copy in self._copies.values():
            copy.catch_up()
        self._guards.append(guard)
        return lambda: self._guards.remove(guard)

    def add_watcher(self, watcher: Watcher) -> Callable[[], None]:
        """Call ``watcher(copy, key)`` whenever a gradient is retained. Returns a function that removes it."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def _guarded(self, copy: BlockCopy, record: StepRecord | None) -> AbstractContextManager[object]:
        if not self._guards:
            return _UNGUARDED
        with ExitStack() as stack:
            for guard in self._guards:
                stack.enter_context(guard(copy, record))
            return stack.pop_all()
