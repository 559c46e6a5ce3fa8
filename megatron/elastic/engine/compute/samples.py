"""Samples by address: any rank can read any sample of any step.

Row ``row`` of a step that starts at ``first`` consumed samples is sample
``first + row``. Each generation's plan chooses the rank that reads it. A source therefore
has no position that advances, and reading twice gives the same bytes.

Prefetching is torch's ``DataLoader`` over an endless batch sampler that follows
the present plan. A batch carries its sample numbers through the loader, so the samples of a
piece are known and not assumed (:mod:`ledger`). After a change of plan, or a step that was
not read to its end, the same workers read on from another address: starting workers is a
fork of the whole rank, which takes longer than a recovery. Only a dead worker makes the
loader start new ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils import signal_handling

from megatron.elastic.engine.compute.ledger import PieceReading, content_digests
from megatron.elastic.plan.model import Piece

__all__ = ["DatasetSource", "PieceBatch", "SampleSource", "StepAddress"]

_PR_SET_PDEATHSIG = 1
_WORKER_DIED = (RuntimeError, EOFError, OSError)
"""Errors of a loader after a worker died: torch's own, or those of reading the shared memory that held its batch."""
Numbered = tuple[tuple[int, ...], Any]
"""Global sample numbers, and the batch made of those samples."""


@dataclass(frozen=True)
class StepAddress:
    """The samples of a step. ``first``: number of samples consumed before it; ``size``: its rows."""

    first: int
    size: int

    def samples(self, piece: Piece) -> tuple[int, ...]:
        """Return the global numbers of the samples of ``piece``, in row order."""
        return tuple(self.first + row for row in piece.rows)


class PieceBatch(Iterator[Any]):
    """The batch of one piece as Megatron's ``data_iterator``: yields once, and is fetched only then."""

    def __init__(self, fetch: Callable[[], Numbered] | None = None, reading: PieceReading | None = None) -> None:
        self._fetch = fetch
        self.reading = reading
        """The samples that were yielded; ``None`` before that."""

    @classmethod
    def as_planned(cls, samples: tuple[int, ...]) -> PieceBatch:
        """Return an empty batch that reports the planned samples, for a model that makes its own inputs."""
        return cls(reading=PieceReading(samples, (0,) * len(samples)))

    def __next__(self) -> Any:
        if self._fetch is None:
            raise StopIteration
        fetch, self._fetch = self._fetch, None
        samples, batch = fetch()
        self.reading = PieceReading(samples, content_digests(batch, len(samples)))
        return batch


class SampleSource(Protocol):
    """The source of a step's samples."""

    def plan(self, pieces: Sequence[Piece]) -> None:
        """Set the pieces that this rank reads each step from now on, in reading order; without any it reads none."""

    def begin(self, address: StepAddress) -> Callable[[Piece], PieceBatch]:
        """Return the reader of one step: ``reader(piece)`` yields that piece's collated batch once."""


class DatasetSource:
    """A map-style data set behind :class:`SampleSource`.

    ``order(sample)`` gives the data set index of a global sample number. Raises
    ``IndexError`` (from the data set or ``order``) past the end of the data, when a batch is fetched.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: Callable[[int], int],
        workers: int = 0,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._workers = workers
        self._collate = collate
        self._pieces: tuple[Piece, ...] = ()
        self._loader: _PieceLoader | None = None

    def plan(self, pieces: Sequence[Piece]) -> None:
        """Set the pieces of each step (:class:`SampleSource`); without any, loader workers are stopped."""
        self._pieces = tuple(pieces)
        if not self._pieces:
            self.close()

    def begin(self, address: StepAddress) -> Callable[[Piece], PieceBatch]:
        """Return the reader of one step (:class:`SampleSource`)."""
        if self._workers == 0 or not self._pieces:
            return lambda piece: PieceBatch(lambda: self._read(address, piece))
        if self._loader is not None and not self._loader.reads(self._pieces, address):
            self._loader = self._loader_at(address)
        return lambda piece: PieceBatch(lambda: self._prefetched(address, piece))

    def close(self) -> None:
        """Stop loader workers, if any."""
        self._loader = None

    def _read(self, address: StepAddress, piece: Piece) -> Numbered:
        samples = address.samples(piece)
        return samples, self._collate([self._dataset[self._order(sample)] for sample in samples])

    def _loader_at(self, address: StepAddress) -> _PieceLoader:
        """Return a loader that reads the present pieces from ``address`` on: the one that is here, or a new one."""
        if self._loader is not None and self._loader.alive():
            with contextlib.suppress(*_WORKER_DIED):
                self._loader.move(self._pieces, address)
                return self._loader
        return _PieceLoader(self._dataset, self._order, self._workers, self._collate, self._pieces, address)

    def _prefetched(self, address: StepAddress, piece: Piece) -> Numbered:
        """Return the loader's next batch if it is the piece's; otherwise read the samples in this process.

        The first batch that is fetched starts the loader: a forward step may take none.
        """
        if self._loader is None and piece == self._pieces[0]:
            self._loader = self._loader_at(address)
        if self._loader is not None and self._loader.offers(address, piece):
            try:
                return self._loader.take()
            except (StopIteration, *_WORKER_DIED):
                pass  # The next step starts workers again.
        self.close()
        return self._read(address, piece)


class _PieceLoader:
    """Loader workers that read a plan's pieces, step after step; :meth:`move` sends them elsewhere.

    Invariant: ``position`` is (step, index of the piece) of the batch that :meth:`take` returns next. It moves when a
    batch is taken, not when a step begins: a loss may interrupt a step anywhere.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: Callable[[int], int],
        workers: int,
        collate: Callable[[list[Any]], Any],
        pieces: tuple[Piece, ...],
        address: StepAddress,
    ) -> None:
        self._following = _Following(order)
        self._loader = DataLoader(
            _Numbered(dataset),
            batch_sampler=self._following,
            num_workers=workers,
            collate_fn=_NumberedCollate(collate),
            worker_init_fn=_die_with(os.getpid()),
            persistent_workers=True,
        )
        self.move(pieces, address)

    def move(self, pieces: tuple[Piece, ...], address: StepAddress) -> None:
        """Read ``pieces`` from the step at ``address`` on.

        Waits until the workers have read the batches that were asked of them before (two each), and drops those.
        Raises the errors that a dead worker causes.
        """
        self._following.pieces, self._following.address = pieces, address
        self._batches = _quiet(iter(self._loader))
        self.position = (address, 0)

    def alive(self) -> bool:
        """Return whether no worker has died. Torch notices a dead one only after five seconds of waiting."""
        return all(worker.is_alive() for worker in self._batches._workers)

    def reads(self, pieces: tuple[Piece, ...], address: StepAddress) -> bool:
        """Return whether the next batch is the first of ``pieces`` in the step at ``address``."""
        return self._following.pieces == pieces and self.position == (address, 0)

    def offers(self, address: StepAddress, piece: Piece) -> bool:
        """Return whether the next batch is that of ``piece`` in the step at ``address``."""
        there, index = self.position
        return there == address and self._following.pieces[index] == piece

    def take(self) -> Numbered:
        """Return the next batch with its sample numbers. Raises the errors that a dead loader worker causes."""
        numbered: Numbered = next(self._batches)
        address, index = self.position
        following = index + 1 < len(self._following.pieces)
        self.position = (address, index + 1) if following else (_after(address), 0)
        return numbered


class _Numbered(Dataset[Any]):
    """A data set that maps (sample number, index) to (sample number, item)."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitem__(self, at: tuple[int, int]) -> tuple[int, Any]:
        sample, index = at
        return sample, self._dataset[index]


class _NumberedCollate:
    """Collates items and returns them with their sample numbers."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, numbered: list[tuple[int, Any]]) -> Numbered:
        return tuple(sample for sample, _ in numbered), self._collate([item for _, item in numbered])


class _Following:
    """Endless batches of (sample number, data set index): ``pieces`` of the step at ``address``, and of those after."""

    def __init__(self, order: Callable[[int], int]) -> None:
        self._order = order
        self.pieces: tuple[Piece, ...] = ()
        self.address = StepAddress(0, 0)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        pieces, address = self.pieces, self.address
        while True:
            for piece in pieces:
                try:
                    yield [(sample, self._order(sample)) for sample in address.samples(piece)]
                except IndexError:
                    return
            address = _after(address)


def _after(address: StepAddress) -> StepAddress:
    return StepAddress(address.first + address.size, address.size)


def _quiet(loader: Any) -> Any:
    """Keep torch's SIGCHLD handler from raising in unrelated code when such a worker ends.

    The reader that waits for the worker notices its end.
    """
    if loader._worker_pids_set:
        signal_handling._remove_worker_pids(id(loader))
        loader._worker_pids_set = False
    return loader


def _die_with(parent: int) -> Callable[[int], None]:
    """Return an initialiser that ends loader workers with the rank that started them, also if it is killed."""

    def init(_: int) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return init
