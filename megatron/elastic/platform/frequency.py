"""Clocks of the device a rank computes on: GPU (NVML), NPU (DCMI) or CPUs (cpufreq).

The frequency axis absorbs what imbalance is left after the other axes (docs/design.md
§7). A clock outlives the process that set it, so nothing is set before a *guard* runs. The guard is a small
process that watches this one through a pidfd and restores the clocks when it ends in any way.

Invariant: between the first ``set`` and ``restore`` a guard is alive. It restores the setting from before
that first ``set``. CPUs that share clocks with those that another process sets are refused.
A control that cannot be used
says why in one line; it never pretends.

Drivers: ``csrc/frequency`` and :mod:`~megatron.elastic.platform.nvml`; the guard: ``frequency_guard``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol

from megatron.elastic import _frequency
from megatron.elastic.platform.visible_devices import number_on_machine

__all__ = [
    "Applied",
    "FrequencyControl",
    "FrequencyUnavailable",
    "Kind",
    "Limits",
    "NativeFrequency",
    "NoFrequency",
    "frequency_of",
    "open_frequency",
]

Kind = Literal["nvml", "dcmi", "cpufreq"]

_FIX: dict[str, str] = {
    "nvml": "locking GPU clocks needs root on the host (as nvidia-smi --lock-gpu-clocks does)",
    "dcmi": "setting an NPU's working level needs root on the host, outside containers",
    "cpufreq": "write access to scaling_min_freq and scaling_max_freq of these CPUs is needed",
}


class FrequencyUnavailable(RuntimeError):
    """Clocks cannot be read or set here; one line with the reason and the remedy."""


@dataclass(frozen=True)
class Limits:
    """Clocks that can be requested, in kHz. Without ``steps_khz`` any value between the two."""

    min_khz: int
    max_khz: int
    steps_khz: tuple[int, ...] = ()


@dataclass(frozen=True)
class Applied:
    """The result of a request."""

    asked_khz: int
    set_khz: int
    """The lowest step that is not below the request (the highest, if all are)."""
    observed_khz: int
    """The clock of the device at the last read; a hot or power-capped device runs slower than it was set to."""
    verified: bool
    """The setting was read back, or its clock was seen."""


class FrequencyControl(Protocol):
    """One device's clock."""

    def available(self) -> bool:
        """True if there is a clock to set. Only :meth:`set` finds out that it is *permitted*."""

    def why(self) -> str:
        """One line: the controlled clocks, or the reason why there are none."""

    def limits(self) -> Limits:
        """Raises ``FrequencyUnavailable``."""

    def current(self) -> int:
        """kHz the device runs at now. Raises ``FrequencyUnavailable``."""

    def set(self, khz: int, more_power: bool = False) -> Applied:
        """Set the clock; with ``more_power`` raise the power limit first, where the device has one that can be set.

        Raises ``FrequencyUnavailable``; then nothing was changed.
        """

    def restore(self) -> None:
        """Restore the setting from before the first :meth:`set`. Idempotent."""

    def power_mw(self) -> int | None:
        """Milliwatts; None where the platform does not say. CPUs: the mean since the call before."""


@dataclass(frozen=True)
class NoFrequency:
    """The control of a platform that offers none."""

    reason: str

    def available(self) -> bool:
        return False

    def why(self) -> str:
        return self.reason

    def limits(self) -> Limits:
        raise FrequencyUnavailable(self.reason)

    def current(self) -> int:
        raise FrequencyUnavailable(self.reason)

    def set(self, khz: int, more_power: bool = False) -> Applied:
        raise FrequencyUnavailable(self.reason)

    def restore(self) -> None:
        return

    def power_mw(self) -> int | None:
        return None


class Driver(Protocol):
    """One clock domain. Its methods raise ``Unavailable`` and ``NotPermitted`` of ``megatron.elastic._frequency``."""

    def describe(self) -> str: ...
    def limits(self) -> Limits | _frequency.Limits: ...
    def current_khz(self) -> int: ...
    def set(self, khz: int) -> Applied | _frequency.Applied: ...
    def raise_power(self) -> None:
        """Allow the device its highest power, where the platform has a limit to set."""

    def snapshot(self) -> str:
        """All that :meth:`restore` needs, in this process or in the guard."""

    def restore(self, snapshot: str) -> None: ...
    def claim(self) -> None:
        """Keep other processes that ask likewise from the clocks until this object goes."""

    def power_mw(self) -> int:
        """Milliwatts; -1 where the platform does not say."""


def open_driver(kind: str, device: str, path: str) -> Driver:
    """Raises ``Unavailable`` or ``NotPermitted`` of ``megatron.elastic._frequency``, or ``ValueError``."""
    if kind != "nvml":
        return _frequency.Driver(kind, device, path)
    from megatron.elastic.platform.nvml import NvmlDriver

    return NvmlDriver(device, path)


class NativeFrequency:
    """A driver with its guard. Usable as a context manager."""

    def __init__(self, kind: Kind, device: str, path: str = "") -> None:
        """Raises ``FrequencyUnavailable`` when library, device or feature are missing."""
        self._kind, self._device, self._path = kind, device, path
        self._guard: subprocess.Popen[bytes] | None = None
        self._before = ""
        try:
            self._driver = open_driver(kind, device, path)
            self._driver.limits()
        except (_frequency.Unavailable, _frequency.NotPermitted, ValueError) as error:
            raise self._refusal(error) from error

    def available(self) -> bool:
        return True

    def why(self) -> str:
        return self._driver.describe()

    def limits(self) -> Limits:
        try:
            limits = self._driver.limits()
        except (_frequency.Unavailable, _frequency.NotPermitted) as error:
            raise self._refusal(error) from error
        return Limits(limits.min_khz, limits.max_khz, tuple(limits.steps_khz))

    def current(self) -> int:
        try:
            return self._driver.current_khz()
        except (_frequency.Unavailable, _frequency.NotPermitted) as error:
            raise self._refusal(error) from error

    def set(self, khz: int, more_power: bool = False) -> Applied:
        first = self._guard is None
        try:
            if first:
                self._before = self._driver.snapshot()
            if first or self._guard_died():
                self._guard = self._start_guard()
            if more_power:
                self._driver.raise_power()
            done = self._driver.set(khz)
        except (_frequency.Unavailable, _frequency.NotPermitted) as error:
            if first:
                self._undo()
            raise self._refusal(error) from error
        return Applied(done.asked_khz, done.set_khz, done.observed_khz, done.verified)

    def restore(self) -> None:
        if self._guard is None:
            return
        try:
            self._driver.restore(self._before)
        except (_frequency.Unavailable, _frequency.NotPermitted) as error:
            raise self._refusal(error) from error  # the guard stays: it will try again
        self._release_guard()

    def power_mw(self) -> int | None:
        try:
            power = self._driver.power_mw()
        except (_frequency.Unavailable, _frequency.NotPermitted):
            return None
        return None if power < 0 else power

    def __enter__(self) -> NativeFrequency:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def _undo(self) -> None:
        """A first ``set`` that failed may have reached some CPUs: put them back, then let the guard go."""
        with suppress(_frequency.Unavailable, _frequency.NotPermitted):
            self._driver.restore(self._before)
        self._release_guard()

    def _refusal(self, error: Exception) -> FrequencyUnavailable:
        hint = f"; {_FIX[self._kind]}" if isinstance(error, _frequency.NotPermitted) else ""
        return FrequencyUnavailable(f"frequency axis off for {self._kind} device {self._device}: {error}{hint}")

    def _start_guard(self) -> subprocess.Popen[bytes]:
        """A guard that has opened the device and watches this process. Raises ``FrequencyUnavailable``."""
        try:
            owner = os.pidfd_open(os.getpid())
        except OSError as error:
            raise FrequencyUnavailable(
                f"clocks are not changed: pidfd_open failed ({error}); it needs Linux 5.3"
            ) from error
        module = "megatron.elastic.platform.frequency_guard"
        try:
            guard = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(owner), self._kind, self._device, self._path, self._before],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(owner,),
                start_new_session=True,  # signals to the job's process group must not end it
            )
        finally:
            os.close(owner)
        assert guard.stdout is not None
        said = guard.stdout.readline().decode().strip()
        guard.stdout.close()
        if said != "ready":
            guard.wait()
            why = said or f"the guard process ended with status {guard.returncode}"
            raise FrequencyUnavailable(f"clocks of {self._kind} device {self._device} are not changed: {why}")
        return guard

    def _guard_died(self) -> bool:
        """True if the guard has ended; then the clocks are restored at once, so that the next guard finds them so."""
        if self._guard is None or self._guard.poll() is None:
            return False
        self._driver.restore(self._before)
        return True

    def _release_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is None or guard.stdin is None:
            return
        with suppress(BrokenPipeError):
            guard.stdin.write(b"r")
            guard.stdin.close()
        guard.wait()


def open_frequency(kind: Kind, device: str, path: str = "") -> FrequencyControl:
    """The control of ``device``; a :class:`NoFrequency` that says why when there is none.

    ``device``: nvml: index, PCI bus id or ``GPU-…`` UUID; dcmi: index or ``card:device``;
    cpufreq: CPU list (``0-3,8``). ``path``: vendor library, or root of sysfs, instead of the usual.
    """
    try:
        return NativeFrequency(kind, device, path)
    except FrequencyUnavailable as error:
        return NoFrequency(str(error))


def frequency_of(platform: str, index: int = 0) -> FrequencyControl:
    """The control of this process's device: ``platform`` is 'cpu', 'cuda' or 'npu', ``index`` as torch counts.

    CPU: the CPUs this process is bound to; none where it shares all of them with other ranks of the node.
    """
    if platform == "cpu":
        own = os.sched_getaffinity(0)
        if len(own) == os.cpu_count() and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
            return NoFrequency(
                "frequency axis off: the ranks of this node share its CPUs; bind each to its own (taskset)"
            )
        return open_frequency("cpufreq", ",".join(map(str, sorted(own))))
    if platform == "cuda":
        import torch

        return open_frequency("nvml", f"GPU-{torch.cuda.get_device_properties(index).uuid}")
    if platform == "npu":
        return open_frequency("dcmi", number_on_machine(index, "ASCEND_RT_VISIBLE_DEVICES"))
    return NoFrequency(f"frequency axis off: no clocks are known for platform {platform!r}")
