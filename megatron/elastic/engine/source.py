"""Samples by address, so that any rank can read any sample of any step.

The nominal grid consumes sample ``first + row`` at row ``row`` of a step that
starts at ``first`` consumed samples. Which rank reads it is the plan's choice,
made anew at each generation; a source therefore never advances by being read,
and reading twice gives the same bytes.

Prefetching is torch's ``DataLoader`` over an endless batch sampler that follows
the present plan; a change of plan, or a dead loader worker, starts it anew.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils import signal_handling

from megatron.elastic.plan.model import Piece

__all__ = ["DatasetSource", "SampleSource", "StepAddress"]

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class StepAddress:
    """``first``: samples consumed before the step; ``size``: rows in it."""

    first: int
    size: int


class SampleSource(Protocol):
    """Where a step's samples come from."""

    def plan(self, pieces: Sequence[Piece]) -> None:
        """The pieces this rank reads each step, in reading order, until told otherwise."""

    def begin(self, address: StepAddress) -> Callable[[Piece], Iterator[Any]]:
        """Reader of one step: ``reader(piece)`` yields that piece's collated batch once."""


class DatasetSource:
    """A map-style data set behind :class:`SampleSource`.

    ``order(sample)`` gives the data set index of a global sample number. Raises
    ``IndexError`` (from the data set or ``order``) past the end of the data.
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
        self._loader: Iterator[Any] | None = None
        self._next: StepAddress | None = None

    def plan(self, pieces: Sequence[Piece]) -> None:
        """See :class:`SampleSource`; prefetched batches of an older plan are dropped."""
        if tuple(pieces) != self._pieces:
            self._pieces = tuple(pieces)
            self.close()

    def begin(self, address: StepAddress) -> Callable[[Piece], Iterator[Any]]:
        """See :class:`SampleSource`."""
        if self._workers == 0 or not self._pieces:
            return lambda piece: iter([self._read(address, piece)])
        return self._prefetched(address)

    def close(self) -> None:
        """Stop loader workers, if any."""
        self._loader = None
        self._next = None

    def _read(self, address: StepAddress, piece: Piece) -> Any:
        return self._collate([self._dataset[index] for index in self._indices(address, piece)])

    def _indices(self, address: StepAddress, piece: Piece) -> list[int]:
        return [self._order(address.first + row) for row in piece.rows]

    def _prefetched(self, address: StepAddress) -> Callable[[Piece], Iterator[Any]]:
        """Batches arrive in plan order; a reader asked out of order falls back to reading directly."""
        if self._loader is None or self._next != address:
            self._loader = _quiet(
                iter(
                    DataLoader(
                        self._dataset,
                        batch_sampler=_Following(self, address),
                        num_workers=self._workers,
                        collate_fn=self._collate,
                        worker_init_fn=_die_with(os.getpid()),
                    )
                )
            )
        self._next = StepAddress(address.first + address.size, address.size)
        expected = iter(self._pieces)

        def read(piece: Piece) -> Iterator[Any]:
            if self._loader is None or next(expected, None) != piece:
                self.close()
                return iter([self._read(address, piece)])
            try:
                return iter([next(self._loader)])
            except (RuntimeError, StopIteration, EOFError, OSError):
                # A loader worker died (it is nobody's rank), or did before its batch was fetched from its
                # shared memory: read here, start workers anew next step.
                self.close()
                return iter([self._read(address, piece)])

        return read


class _Following:
    """Endless batches of data set indices: this rank's pieces, step after step."""

    def __init__(self, source: DatasetSource, address: StepAddress) -> None:
        self._source = source
        self._address = address

    def __iter__(self) -> Iterator[list[int]]:
        address = self._address
        while True:
            for piece in self._source._pieces:
                try:
                    yield self._source._indices(address, piece)
                except IndexError:
                    return
            address = StepAddress(address.first + address.size, address.size)


def _quiet(loader: Any) -> Iterator[Any]:
    """Keep torch's SIGCHLD handler from raising about these workers wherever the rank happens to be.

    Their death is then noticed where it matters, by the reader that waits for one.
    """
    if loader._worker_pids_set:
        signal_handling._remove_worker_pids(id(loader))
        loader._worker_pids_set = False
    return loader  # type: ignore[no-any-return]


def _die_with(parent: int) -> Callable[[int], None]:
    """Loader workers end with the rank that started them, also when it is killed."""

    def init(_: int) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return init
