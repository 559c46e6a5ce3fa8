"""Objects in torch's thread-local state: unlike a ``ContextVar``, autograd passes it on to the threads of its devices.

Invariant: the state has a reference of its own to what it holds, with every release of torch. Torch 2.11 takes over
its caller's (``_stash_obj_in_tls`` counts none), and the object would be freed while it is in use.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch

__all__ = ["get", "put"]

_PROBE = "megatron.elastic.engine.compute.thread_state.probe"


def put(name: str, value: object) -> None:
    """Keep ``value`` under ``name`` in the calling thread's state."""
    if _takes_over():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(name, value)


def get(name: str) -> Any:
    """Return the object under ``name``, None if there is none."""
    return torch._C._get_obj_in_tls(name) if torch._C._is_key_in_tls(name) else None


@cache
def _takes_over() -> bool:
    """Return whether this torch takes over its caller's reference: then the count of one that it keeps is the same."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(_PROBE, probe)
    taken = sys.getrefcount(probe) == before
    for kept in (probe, None) if taken else ():  # None replaces the probe
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    torch._C._stash_obj_in_tls(_PROBE, None)
    return taken
