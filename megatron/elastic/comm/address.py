"""Numbers and addresses of a job's ranks: values that travel through the control plane.

Imports no torch, so that agents and ``ctl`` start without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

__all__ = ["Address", "EndpointValue", "Rank"]

Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""A global rank."""
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
EndpointValue = _Int64 | str | list[_Int64 | str | list[_Int64]]
"""A field of a transport's endpoint: a number, a text, or a list of both or of lists of numbers."""


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address of one incarnation of a rank. ``endpoint`` is the transport's own."""

    rank: Rank
    incarnation: _Int64
    host: str
    endpoint: Mapping[str, EndpointValue] = {}
    domain: str = ""
    """Label of the failure domains that it is in (:mod:`megatron.elastic.state.domains`); empty: its host."""
