"""Dynamic communicator: process groups that are edited in place.

:func:`megatron.elastic.comm.backend.make_fabric` makes the implementation that the configuration names, and
``install`` puts its groups under ``torch.distributed``. The interface is :mod:`megatron.elastic.comm.fabric`.
"""
