"""Dynamic communicator: process groups that are edited in place.

``make_fabric`` picks the implementation the configuration names; ``install``
puts its groups under ``torch.distributed``. See :mod:`megatron.elastic.comm.fabric`.
"""

from megatron.elastic.comm.backend import Installation, install, make_fabric, register_backend
from megatron.elastic.comm.errors import CommError, CommTimeout, GenerationChanged, PeerLost
from megatron.elastic.comm.fabric import Address, BlockRange, EditReport, Fabric

__all__ = [
    "Address",
    "BlockRange",
    "CommError",
    "CommTimeout",
    "EditReport",
    "Fabric",
    "GenerationChanged",
    "Installation",
    "PeerLost",
    "install",
    "make_fabric",
    "register_backend",
]
