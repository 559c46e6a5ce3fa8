"""Faults of this machine's NVIDIA GPUs, through NVIDIA's own bindings of NVML (``pynvml``, of nvidia-ml-py).

Invariant: only faults of the hardware are findings. XID errors that a program causes by itself, such as 13, 31, 43 and
45, are not.
Source: NVIDIA, "XID Errors", and NVML's reference for ECC counters and row remapping.
"""

from __future__ import annotations

import ctypes
import importlib
import weakref
from contextlib import suppress
from typing import Any

from megatron.elastic._frequency import Unavailable

__all__ = ["HARDWARE_XIDS", "GpuHealth"]

HARDWARE_XIDS = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    63: "row remapping event",
    64: "row remapping failure",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high single-bit ECC error rate",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP RPC time-out",
    120: "GSP error",
}


class GpuHealth:
    """The GPUs that the driver shows. ``path``: the library to use, of the name ``libnvidia-ml.so.1`` (SONAME).

    Raises ``Unavailable`` where package, library or driver are missing.
    """

    def __init__(self, path: str = "") -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
            if path:
                ctypes.CDLL(path)  # pynvml's own look for this name finds the one that is loaded
            self._nvml.nvmlInit()
        except ImportError:
            raise Unavailable("NVIDIA GPUs need the package nvidia-ml-py: pip install nvidia-ml-py") from None
        except OSError as error:
            raise Unavailable(f"cannot load {path}: {error}") from None
        except self._nvml.NVMLError as error:
            raise Unavailable(f"nvmlInit: {error}") from None
        weakref.finalize(self, self._nvml.nvmlShutdown)
        self._faults: dict[int, str] = {}
        """GPU → the first fault that its driver reported as an event."""
        try:
            self._devices = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]
            self._ecc = [self._uncorrected(device) for device in self._devices]
            self._events = self._nvml.nvmlEventSetCreate()
            for device in self._devices:
                self._register(device)
        except self._nvml.NVMLError as error:
            raise Unavailable(f"NVML: {error}") from None

    def look(self) -> str:
        """Return the present faults in one line; empty: none. A fault that was an event stays one."""
        self._read_events()
        found = []
        for index, device in enumerate(self._devices):
            fault = self._faults.get(index) or self._fault(index, device)
            if fault:
                found.append(f"GPU {index}: {fault}")
        return ", ".join(found)

    def _register(self, device: Any) -> None:
        with suppress(self._nvml.NVMLError_NotSupported):  # then its counters alone are read
            self._nvml.nvmlDeviceRegisterEvents(device, self._nvml.nvmlEventTypeXidCriticalError, self._events)

    def _read_events(self) -> None:
        while True:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError_Timeout:
                return
            except self._nvml.NVMLError as error:
                raise Unavailable(f"nvmlEventSetWait: {error}") from None
            what = HARDWARE_XIDS.get(int(event.eventData))
            if what is not None:
                self._faults.setdefault(self._index(event.device), f"XID {int(event.eventData)}, {what}")

    def _index(self, device: Any) -> int:
        """Return the number of the GPU of an event, whose handle is another object than the one that was registered."""
        here = [ctypes.cast(each, ctypes.c_void_p).value for each in self._devices]
        return here.index(ctypes.cast(device, ctypes.c_void_p).value)

    def _fault(self, index: int, device: Any) -> str:
        try:
            count = self._uncorrected(device)
            if count > self._ecc[index]:
                return f"{count - self._ecc[index]} uncorrected ECC errors since the start"
            _, _, pending, failed = self._nvml.nvmlDeviceGetRemappedRows(device)
        except self._nvml.NVMLError_NotSupported:
            return ""
        except self._nvml.NVMLError_GpuIsLost:
            return "the driver has lost it"
        except self._nvml.NVMLError as error:
            return f"NVML: {error}"
        if failed:
            return "remapping of a memory row has failed"
        return "remapping of a memory row waits for a reset of the GPU" if pending else ""

    def _uncorrected(self, device: Any) -> int:
        """Return the number of uncorrected ECC errors since the driver was loaded; 0 without ECC."""
        nvml = self._nvml
        try:
            kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            return int(nvml.nvmlDeviceGetTotalEccErrors(device, *kind))
        except nvml.NVMLError_NotSupported:
            return 0
