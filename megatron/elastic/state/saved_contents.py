"""The contents of a saved version, hashed block by block by their owners and compared after a load.

The hashes of files in a manifest show that the bytes that are read are those that were written. They do not show that
the writer wrote the owners' state, nor that a load puts each tensor in its place. So the owner of a block hashes it as
it hands it to the writers, and the manifest carries these hashes. The certificate of the load compares them with the
state that training would go on from.

Invariant: hashes are comparable only under the layout in which they were made (:func:`layout_digest`). It depends on
the model and on the tensor-parallel size, not on pipeline or data parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.elastic.state.hashing import text_hash
from megatron.elastic.state.layout import BlockKey, UnitLayout, UnitShard

__all__ = ["SavedContents", "layout_digest"]


@dataclass(frozen=True)
class SavedContents:
    """Hash of the state of each block (``content_hash``), and the digest of the layout in which blocks were cut."""

    layout: str
    blocks: Mapping[BlockKey, str]

    def raw(self) -> dict[str, object]:
        """Return JSON values."""
        return {"layout": self.layout, "blocks": [[*key, self.blocks[key]] for key in sorted(self.blocks)]}

    @classmethod
    def from_raw(cls, raw: Mapping[str, object]) -> SavedContents:
        """Inverse of :meth:`raw`. Raises ``KeyError``, ``TypeError`` or ``ValueError``."""
        blocks = raw["blocks"]
        if not isinstance(blocks, list):
            raise TypeError("blocks are a list")
        return cls(str(raw["layout"]), {(int(u), int(s), int(i)): str(hash) for u, s, i, hash in blocks})


def layout_digest(layouts: Mapping[UnitShard, UnitLayout]) -> str:
    """Return a hash of the blocks of all units and of the places of their parameters."""
    cuts = (
        (key, [(slot.spec.name, slot.start, slot.stop) for slot in layout.slots], [b.stop for b in layout.blocks])
        for key, layout in sorted(layouts.items())
    )
    return text_hash(repr(list(cuts)))
