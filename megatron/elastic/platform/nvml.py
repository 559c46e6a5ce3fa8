"""Clock and power limit of one NVIDIA GPU, through NVIDIA's own bindings of NVML (``pynvml``, of nvidia-ml-py).

NVML cannot be asked which lock of clocks was in force, so restoring means unlocking: the driver's default. A power
limit can be asked for, and is put back.
It has the methods of the drivers in ``csrc/frequency`` and raises their errors.
"""

from __future__ import annotations

import ctypes
import importlib
import time
import weakref
from typing import Any

from megatron.elastic._frequency import NotPermitted, Unavailable
from megatron.elastic.platform.frequency import Applied, Limits

__all__ = ["NvmlDriver"]

SETTLE_SECONDS = 0.2
"""A clock change takes tens of milliseconds."""
TOLERANCE_MHZ = 30
"""Reported clocks come in steps of 15."""


class NvmlDriver:
    """``device``: index, PCI bus id or UUID. ``path``: the library to use, of the name ``libnvidia-ml.so.1`` (SONAME).

    Raises ``Unavailable`` where package, library or GPU are missing.
    """

    def __init__(self, device: str, path: str) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
            if path:
                ctypes.CDLL(path)  # pynvml's own look for this name finds the one that is loaded
        except ImportError:
            raise Unavailable("NVIDIA GPUs need the package nvidia-ml-py: pip install nvidia-ml-py") from None
        except OSError as error:
            raise Unavailable(f"cannot load {path}: {error}") from None
        self._call("nvmlInit")
        weakref.finalize(self, self._nvml.nvmlShutdown)
        self._device = self._find(device)

    def describe(self) -> str:
        name = self._call("nvmlDeviceGetName", self._device)
        return f"NVML, {name}"

    def limits(self) -> Limits:
        # Graphics clocks are listed per memory clock; the highest memory clock is the one training runs at.
        memory = self._call("nvmlDeviceGetSupportedMemoryClocks", self._device)
        if not memory:
            raise Unavailable("this GPU lists no memory clocks")
        graphics = self._call("nvmlDeviceGetSupportedGraphicsClocks", self._device, max(memory))
        if not graphics:
            raise Unavailable("this GPU lists no graphics clocks")
        steps = tuple(sorted(mhz * 1000 for mhz in graphics))
        return Limits(steps[0], steps[-1], steps)

    def current_khz(self) -> int:
        return self._clock_mhz() * 1000

    def set(self, khz: int) -> Applied:
        """Lock the lowest step that is not below ``khz`` (the highest, if all are), and wait until it is seen."""
        steps = self.limits().steps_khz
        step = next((one for one in steps if one >= khz), steps[-1])
        mhz = step // 1000
        self._call("nvmlDeviceSetGpuLockedClocks", self._device, mhz, mhz)
        until = time.monotonic() + SETTLE_SECONDS
        seen = self._clock_mhz()
        while abs(seen - mhz) > TOLERANCE_MHZ and time.monotonic() < until:
            time.sleep(0.005)
            seen = self._clock_mhz()
        return Applied(khz, step, seen * 1000, abs(seen - mhz) <= TOLERANCE_MHZ)

    def raise_power(self) -> None:
        """Set the highest power limit that the device allows. A device without such limits is left as it is."""
        if self._power_limit():
            _, highest = self._call("nvmlDeviceGetPowerManagementLimitConstraints", self._device)
            self._call("nvmlDeviceSetPowerManagementLimit", self._device, highest)

    def snapshot(self) -> str:
        """The power limit in mW, 0 without one."""
        return str(self._power_limit())

    def claim(self) -> None:
        """Nothing: a GPU is of one rank."""

    def restore(self, snapshot: str) -> None:
        self._call("nvmlDeviceResetGpuLockedClocks", self._device)
        if int(snapshot) != self._power_limit():
            self._call("nvmlDeviceSetPowerManagementLimit", self._device, int(snapshot))

    def power_mw(self) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetPowerUsage(self._device))
        except self._nvml.NVMLError_NotSupported:
            return -1
        except self._nvml.NVMLError as error:
            raise Unavailable(f"nvmlDeviceGetPowerUsage: {error}") from None

    def _power_limit(self) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetPowerManagementLimit(self._device))
        except self._nvml.NVMLError_NotSupported:
            return 0
        except self._nvml.NVMLError as error:
            raise Unavailable(f"nvmlDeviceGetPowerManagementLimit: {error}") from None

    def _find(self, device: str) -> Any:
        if device.startswith("GPU-"):
            return self._call("nvmlDeviceGetHandleByUUID", device)
        if ":" in device:
            return self._call("nvmlDeviceGetHandleByPciBusId", device)
        if device.isdecimal():
            return self._call("nvmlDeviceGetHandleByIndex", int(device))
        raise ValueError(f"GPU '{device}' is not an index, PCI bus id or UUID")

    def _clock_mhz(self) -> int:
        return int(self._call("nvmlDeviceGetClockInfo", self._device, self._nvml.NVML_CLOCK_SM))

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, name)(*arguments)
        except self._nvml.NVMLError_NoPermission as error:
            raise NotPermitted(f"{name}: {error}") from None
        except self._nvml.NVMLError as error:
            raise Unavailable(f"{name}: {error}") from None
