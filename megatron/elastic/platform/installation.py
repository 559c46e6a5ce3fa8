"""Checks of what a job needs of the machine that it is started on: packages, limits, shared memory, driver.

Nothing here imports torch or opens a device: versions come from the metadata of packages, the driver is looked for in
``/proc`` and ``/dev``. So the checks take a fraction of a second, and also work where ``import torch`` fails.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron.elastic.platform.findings import Finding

__all__ = ["check_installation", "check_open_files"]

_PACKAGE = "megatron-elastic"
_LEAST_PYTHON = (3, 11)
_ALWAYS = ("torch", "megatron-core")
_NATIVE = ("_comm", "_frequency", "_plan", "_process", "_random", "_state")
_GIB = 1 << 30
_LEAST_SHARED = 64 << 20
"""Bytes of /dev/shm below which data-loader workers fail: the default of containers."""


def check_installation(root: Path = Path("/")) -> Iterator[Finding]:
    """All checks of this module but that of open files. ``root``: of the file system, for tests."""
    yield from _versions()
    yield _native_parts()
    yield from _shared_memory(root)
    yield _driver(root)


def check_open_files(needed: int = 0) -> Finding:
    """The hard limit of open files against what a job needs; 0: not known."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    if not needed:
        return Finding("ok", "open files", f"hard limit {shown}, soft limit {soft}")
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return Finding("ok", "open files", f"hard limit {shown}, {needed} needed")
    fix = f"ulimit -Hn {needed}; LimitNOFILE of the service; --ulimit nofile of the container"
    return Finding("missing", "open files", f"{needed} needed, and the hard limit is {shown}: raise it ({fix})")


def _versions() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < _LEAST_PYTHON:
        yield Finding("missing", "Python", f"{python}; {'.'.join(map(str, _LEAST_PYTHON))} or newer is needed")
    else:
        yield Finding("ok", "Python", f"{python} on {platform.machine()}")
    faults, found = [], []
    for name, wanted in _wanted().items():
        version = _version_of(name)
        if version is None:
            faults.append(f"{name} is not installed: pip install '{name}{wanted}'")
        elif wanted and not _fits(version, wanted):
            faults.append(f"{name} is {version}: pip install '{name}{wanted}'")
        elif name in _ALWAYS:
            found.append(f"{name} {version}")
    for fault in faults:
        yield Finding("missing", "packages", fault)
    if not faults:
        own = _version_of(_PACKAGE)
        yield Finding("ok", "packages", ", ".join([f"{_PACKAGE} {own or '(not installed: a folder)'}", *found]))


def _wanted() -> dict[str, str]:
    """Package → versions, as this package declares its needs; '': any, or none declared."""
    wanted = dict.fromkeys(_ALWAYS, "")
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return {**wanted, "packaging": ""}
    try:
        declared = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return wanted
    for line in declared:
        needed = Requirement(line)
        if "extra" in str(needed.marker or ""):
            continue
        # A marker that excludes this interpreter excludes the automatic installation, not the need.
        if needed.marker is None or needed.marker.evaluate() or needed.name in _ALWAYS:
            wanted[needed.name] = str(needed.specifier)
    return wanted


def _fits(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(version, prereleases=True)


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _native_parts() -> Finding:
    missing = [name for name in _NATIVE if importlib.util.find_spec(f"megatron.elastic.{name}") is None]
    if missing:
        fix = "python setup.py build_ext --inplace, or pip install the package again"
        return Finding("missing", "native parts", f"not built for this interpreter: {', '.join(missing)}: {fix}")
    return Finding("ok", "native parts", "built for this interpreter")


def _shared_memory(root: Path) -> Iterator[Finding]:
    place = root / "dev/shm"
    try:
        space = os.statvfs(place)
    except OSError as error:
        yield Finding("missing", "shared memory", f"{place}: {error.strerror}: mount a tmpfs there")
        return
    free = space.f_bavail * space.f_frsize
    if not os.access(place, os.W_OK):
        yield Finding("missing", "shared memory", f"{place} cannot be written to: mount a tmpfs there")
    elif free < _LEAST_SHARED:
        fix = "docker --shm-size, or an emptyDir of medium Memory"
        yield Finding("missing", "shared memory", f"{free >> 20} MiB are free in {place}: mount a larger one ({fix})")
    else:
        yield Finding("ok", "shared memory", f"{free / _GIB:.1f} GiB free in {place}")


def _driver(root: Path) -> Finding:
    torch = _version_of("torch") or ""
    nvidia = root / "proc/driver/nvidia/version"
    if nvidia.is_file():
        version = next((word for word in nvidia.read_text().split() if word[:1].isdigit() and "." in word), "?")
        gpus = root / "proc/driver/nvidia/gpus"
        count = len(list(gpus.iterdir())) if gpus.is_dir() else 0
        devices = list((root / "dev").glob("nvidia[0-9]*"))
        if "+cpu" in torch:
            fix = "install torch's CUDA build (requirements/cuda.txt)"
            return Finding("missing", "driver", f"NVIDIA {version}, but torch {torch} has no CUDA: {fix}")
        if count and not devices:
            fix = "start the container with its GPUs (--gpus all, nvidia.com/gpu)"
            return Finding("missing", "driver", f"NVIDIA {version}, {count} GPUs, but no /dev/nvidia*: {fix}")
        return Finding("ok", "driver", f"NVIDIA {version}, {len(devices)} GPUs")
    npus = list((root / "dev").glob("davinci[0-9]*"))
    if npus:
        return Finding("ok", "driver", f"Ascend, {len(npus)} NPUs")
    return Finding("note", "driver", "no GPU or NPU driver: a job here trains on CPUs")
