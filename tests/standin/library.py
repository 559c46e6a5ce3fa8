"""Builds the stand-in's library once a tree, and opens it."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
from pathlib import Path

import torch as torch  # its libraries first: ours links to them

__all__ = ["build", "checked", "library", "with_interpreter"]

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT / "build" / f"native-{sys.implementation.cache_tag}" / "standin" / "libstandin.so"


def build() -> Path:
    """Bring the library up to date and return its path. Processes take turns (``setup.py`` holds a lock)."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--target=standin"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the stand-in accelerator was not built:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return SHARED


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "standin_error": (ctypes.c_char_p, ()),
    "standin_configure": (ctypes.c_int, (ctypes.c_int, ctypes.c_size_t)),
    "standin_own": (ctypes.c_int, (ctypes.c_int,)),
    "standin_lateness": (None, (ctypes.c_int64,)),
    "standin_explain_faults": (None, ()),
    "standin_device_count": (ctypes.c_int, ()),
    "standin_current_device": (ctypes.c_int, ()),
    "standin_set_device": (ctypes.c_int, (ctypes.c_int,)),
    "standin_synchronize": (ctypes.c_int, (ctypes.c_int,)),
    "standin_memory": (ctypes.c_int, (ctypes.c_int, ctypes.POINTER(ctypes.c_size_t))),
    "standin_reset_peak": (ctypes.c_int, (ctypes.c_int,)),
    "standin_empty_cache": (ctypes.c_int, (ctypes.c_int,)),
    "standin_used": (ctypes.c_int, ()),
    "standin_forked": (ctypes.c_int, ()),
    "standin_sleep": (ctypes.c_int, (ctypes.c_int64,)),
    "standin_unpinned_asynchronous_copies": (ctypes.c_int64, ()),
    "standin_waiting_operators": (ctypes.c_char_p, ()),
    "standin_stream": (ctypes.c_void_p, (ctypes.c_int,)),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The library as it was built last. Opening it registers the devices with torch."""
    opened = ctypes.CDLL(str(SHARED if SHARED.exists() else build()), mode=ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(opened, name)
        function.restype, function.argtypes = result, arguments
    return opened


@functools.cache
def with_interpreter() -> ctypes.PyDLL:
    """The library for calls that make Python objects."""
    opened = ctypes.PyDLL(str(library()._name))
    opened.standin_generator.restype, opened.standin_generator.argtypes = ctypes.py_object, (ctypes.c_int,)
    return opened


def checked(status: int) -> None:
    """Raise ``RuntimeError`` with the library's words unless ``status`` is 0."""
    if status:
        raise RuntimeError(library().standin_error().decode())
