"""Types of the native module built from ``csrc/plan``; times in ns, pieces, cells and units by position."""

from collections.abc import Sequence

class Listing:
    makespan: int
    forced: int
    def orders(self) -> list[list[tuple[int, int]]]: ...

class Group:
    def __init__(
        self,
        pieces: Sequence[tuple[int, int, int, int, int, int]],
        edges: Sequence[tuple[int, int, int]],
        cells: int,
    ) -> None: ...
    def schedule(self, caps: Sequence[int], split_backward: bool, forward_first: bool) -> Listing: ...

def pipeline_time(
    stages: Sequence[tuple[int, int, int, int, int]], count: int, rows: int, split_backward: bool
) -> int: ...
def matching(
    weights: Sequence[Sequence[int]], seats: Sequence[int], takers: Sequence[int], in_order: bool
) -> list[int]: ...
def knapsack(room: int, values: Sequence[int]) -> list[int]: ...

class Reach:
    def __init__(
        self,
        forward: Sequence[int],
        gradient: Sequence[int],
        weight: Sequence[int],
        fixed: Sequence[int],
        held: Sequence[int],
        tied: Sequence[tuple[int, int]],
        room: int,
    ) -> None: ...
    def least(self, first: int, end: int, count: int, held: int) -> int: ...
    def room(self, first: int, end: int) -> int: ...
    def cuts(self, count: int, deadline: int) -> list[int] | None: ...
    def late_cuts(self, count: int, deadline: int) -> list[int] | None: ...
    def pipelines(self, cells: int, total: int, deadline: int) -> list[tuple[list[int], int]]: ...
    def least_deadline(self, cells: int, total: int, quantum: int, low: int, limit: int) -> int | None: ...

class Partition:
    def __init__(
        self,
        work: Sequence[int],
        fixed: Sequence[int],
        held: Sequence[int],
        tied: Sequence[tuple[int, int]],
        moved: Sequence[int],
    ) -> None: ...
    def cut(self, seats: Sequence[tuple[int, int, int]], transfer: int) -> list[int] | None: ...
    def nearest(
        self, seats: Sequence[tuple[int, int, int]], time: int, holds: Sequence[Sequence[tuple[int, int]]]
    ) -> list[int] | None: ...
