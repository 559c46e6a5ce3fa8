"""The vendors' libraries of the stand-in accelerator, built from ``tests/standin/moving_nccl.c``, and jobs with them.

:func:`with_nccl` and :func:`with_hccl` are the environments of jobs whose bulk data goes through such a library: the
first as on GPUs, the second as on Ascend, with the engine's own platform ``npu`` over the stand-in package
``torch_npu`` (``tests/standin/npu``).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.standin.library import ROOT

__all__ = ["VERSIONS", "build_nccl", "with_hccl", "with_nccl"]

SOURCE = ROOT / "tests/standin/moving_nccl.c"
VERSIONS: dict[str, tuple[str, ...]] = {
    "full": (),
    "shrinks": ("REVOKE", "GROW"),
    "basic": ("REVOKE", "SHRINK", "GROW"),
}
"""Version of the library → the functions that it lacks."""


def build_nccl(folder: Path, version: str, *, on_streams: bool) -> Path:
    """Build ``libnccl.so.2`` below ``folder``, unless it is there. ``on_streams``: for the stand-in accelerator."""
    path = folder / version / "libnccl.so.2"
    if not path.exists():
        path.parent.mkdir(parents=True)
        flags = [*(f"-DNO_{name}" for name in VERSIONS[version]), *(["-DON_STREAMS"] if on_streams else [])]
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", path, *flags, SOURCE], check=True, timeout=60)
    return path


def _library(folder: Path, version: str) -> dict[str, str]:
    path = build_nccl(folder, version, on_streams=True)
    return {"LD_LIBRARY_PATH": str(path.parent), "STANDIN_DIR": str(path.parent), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def with_nccl(folder: Path, version: str = "full") -> dict[str, str]:
    """The environment of a job whose ranks have stand-in devices and this version of NCCL."""
    platform = {"ELASTIC_PLATFORM": "tests.standin.platform:NcclPlatform", "STANDIN_OWN": "local"}
    return {**platform, **_library(folder, version)}


def with_hccl(folder: Path) -> dict[str, str]:
    """The environment of a job on Ascend devices, which the stand-in's are under that name."""
    platform = {"ELASTIC_PLATFORM": "npu", "STANDIN_NAME": "npu", "STANDIN_OWN": "local"}
    return {**platform, **_library(folder, "basic"), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/standin/npu'}"}
