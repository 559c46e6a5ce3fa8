"""Layouts of the peers' jobs: replicas of the model, and the parts that the ranks of a replica have.

A replica is made of consecutive ranks and holds the whole model once. Its ranks hold the model's parts: a shard of each
layer's weights under tensor parallelism, some of the layers under pipeline parallelism. Replicas share the samples.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LAYOUTS", "PLAIN", "Layout"]


@dataclass(frozen=True)
class Layout:
    """Sizes of tensor and pipeline parallelism; the rest of the ranks is data parallelism."""

    name: str
    title: str
    tensor: int = 1
    pipeline: int = 1

    @property
    def parts(self) -> int:
        """Ranks of one replica."""
        return self.tensor * self.pipeline

    def replica_of(self, rank: int) -> frozenset[int]:
        """Return the ranks that hold the model together with ``rank``, itself among them."""
        first = rank - rank % self.parts
        return frozenset(range(first, first + self.parts))


PLAIN = Layout("dp4", "four data-parallel ranks")
LAYOUTS = {
    layout.name: layout
    for layout in (
        PLAIN,
        Layout("tp2dp2", "tensor parallel 2 x data parallel 2", tensor=2),
        Layout("pp2dp2", "pipeline parallel 2 x data parallel 2", pipeline=2),
    )
}
"""By name; those with several parts are of four ranks."""
