"""Noise in a router's input that depends on samples, not on ranks.

A router's input is multiplied by uniform numbers between 1 - eps and 1 + eps (Fedus, Zoph, Shazeer, arXiv 2101.03961).
They are drawn as dropout masks are (:mod:`dropout`): from seed, step, sample, unit and place in the activation. So a
micro-batch that is computed again, on another rank or in backward, has the same noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.elastic.engine.compute.dropout import DropoutKey, Intervals, Section, Site, Split, current_key, placed
from megatron.elastic.engine.compute.philox import random_words

__all__ = ["SampleJitter"]


@dataclass(frozen=True)
class SampleJitter:
    """Draws the noise of one router.

    ``split``: the slice of the sequence that this rank has (None: the whole); ``intervals``: its slices, if several.
    """

    eps: float
    unit: int
    dtype: torch.dtype
    device: torch.device
    split: Split | Section | None = None
    intervals: Intervals | None = None

    def __call__(self, sizes: Sequence[int]) -> torch.Tensor:
        """Return the factors of an input of ``sizes`` = [s, b, h]. Raises ``RuntimeError`` outside of a piece."""
        key = current_key()
        if key is None:
            raise RuntimeError("a router's noise is drawn outside of a piece, so it belongs to no sample")
        if self.intervals is None:
            return self._drawn(key, sizes, self.split)
        sections = zip(self.intervals.runs, self.intervals.sections(), strict=True)
        drawn = [self._drawn(key, (stop - start, *sizes[1:]), section) for (start, stop), section in sections]
        return torch.cat(drawn)

    def _drawn(self, key: DropoutKey, sizes: Sequence[int], where: Split | Section | None) -> torch.Tensor:
        split = None if isinstance(where, Split) and where.count == 1 else where
        extent, offset = placed(sizes, 1, split)
        words = random_words(
            sizes=tuple(sizes),
            sample_dim=1,
            extent=extent,
            offset=offset,
            seed=key.seed % 2**64,
            step=key.step,
            unit=self.unit,
            site=key.site(Site.ROUTER_INPUT),
            samples=key.samples,
            device=self.device,
        )
        return (1.0 - self.eps + words.double() * (2.0 * self.eps / 2**32)).to(self.dtype)
