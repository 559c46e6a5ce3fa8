"""Which platform this process runs on.

CUDA if torch sees a device, else Ascend, else CPU. ``ELASTIC_PLATFORM`` names one
outright (the launcher hands it to its workers; a test on a GPU machine asks for
``cpu``), also one of another package, as ``module:Class``. There is no fallback from
a platform asked for by name.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping

from megatron.elastic.platform.base import Platform, PlatformUnavailable
from megatron.elastic.platform.cpu import CpuPlatform
from megatron.elastic.platform.cuda import CudaPlatform
from megatron.elastic.platform.npu import NpuPlatform

__all__ = ["ENVIRONMENT_NAME", "PLATFORMS", "select"]

ENVIRONMENT_NAME = "ELASTIC_PLATFORM"

PLATFORMS: Mapping[str, type[Platform]] = {"cuda": CudaPlatform, "npu": NpuPlatform, "cpu": CpuPlatform}
"""In order of preference."""


def select(name: str | None = None) -> Platform:
    """The platform ``name``, or the one the environment names, or the first available.

    ``module:Class`` names a :class:`Platform` outside of this package. Raises :class:`PlatformUnavailable` for an
    unknown name or a device that is not there.
    """
    wanted = name or os.environ.get(ENVIRONMENT_NAME) or None
    if wanted is None:
        return next(kind() for kind in PLATFORMS.values() if kind.available())
    if ":" in wanted:
        return _elsewhere(wanted)
    if wanted not in PLATFORMS:
        raise PlatformUnavailable(f"{ENVIRONMENT_NAME}={wanted}: no such platform (one of {', '.join(PLATFORMS)})")
    if not PLATFORMS[wanted].available():
        raise PlatformUnavailable(f"{ENVIRONMENT_NAME}={wanted}: torch sees no such device on this machine")
    return PLATFORMS[wanted]()


def _elsewhere(wanted: str) -> Platform:
    """The platform ``module:Class``."""
    module, _, name = wanted.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PlatformUnavailable(f"{ENVIRONMENT_NAME}={wanted}: there is no such class ({error})") from error
    if not (isinstance(kind, type) and issubclass(kind, Platform)):
        raise PlatformUnavailable(f"{ENVIRONMENT_NAME}={wanted}: this is no Platform (megatron.elastic.platform.base)")
    if not kind.available():
        raise PlatformUnavailable(f"{ENVIRONMENT_NAME}={wanted}: torch sees no such device on this machine")
    return kind()
