"""``torch.standin``: the functions that ``torch.cuda`` and ``torch.npu`` have, for the stand-in devices.

:func:`register` gives torch's spare device type (PrivateUse1) this name and this module. Settings are read from the
environment once, at that time, the last one at the first use of a device:

- ``STANDIN_DEVICES``: number of devices (4).
- ``STANDIN_BYTES``: memory of one device (4 GiB).
- ``STANDIN_LATENESS``: ``lazy`` (the default: work runs when it is waited for) or seconds between call and execution.
- ``STANDIN_NAME``: the devices' type for torch (``standin``).
- ``STANDIN_OWN=local``: this process may use device LOCAL_RANK modulo the number of devices, and no other.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from tests.standin.library import checked, library, with_interpreter

__all__ = ["NAME", "register"]

NAME = os.environ.get("STANDIN_NAME", "standin")


def index_of(device: Any = None) -> int:
    """The number of a device given as ``None`` (the current one), an integer, a name or a ``torch.device``.

    CUDA's name stands for these devices too: Megatron gives it to functions that are redirected.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type not in (NAME, "cuda"):
            raise ValueError(f"expected a device of type {NAME}, got {device}")
        device = device.index
    return current_device() if device is None or device == -1 else int(device)


# ---------------------------------------------------------------- devices


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return bool(library().standin_used())


def init() -> None:
    """The devices begin by themselves at the first use."""


def _lazy_call(function: Any, **_: object) -> None:
    function()


def _is_in_bad_fork() -> bool:
    return bool(library().standin_forked())


def device_count() -> int:
    return int(library().standin_device_count())


def current_device() -> int:
    return int(library().standin_current_device())


def set_device(device: Any) -> None:
    checked(library().standin_set_device(index_of(device)))


def synchronize(device: Any = None) -> None:
    checked(library().standin_synchronize(index_of(device)))


class device:
    """``with torch.standin.device(i)``."""

    def __init__(self, device: Any) -> None:
        self.idx = index_of(device)

    def __enter__(self) -> None:
        self.previous = current_device()
        set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        set_device(self.previous)


def get_device_name(device: Any = None) -> str:
    return f"stand-in accelerator {index_of(device)}"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (0, 0)


def device_bytes() -> int:
    """Memory of each device."""
    return int(os.environ.get("STANDIN_BYTES", str(1 << 32)))


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Properties of any device, without use of it, as with CUDA: Megatron asks on each rank for those of device 0."""
    index = index_of(device)
    return SimpleNamespace(
        name=get_device_name(index),
        major=0,
        minor=0,
        total_memory=device_bytes(),
        multi_processor_count=1,
        uuid=f"standin-{os.uname().nodename}-{index}",
    )


# ---------------------------------------------------------------- streams


class Stream(torch.Stream):
    """A queue of work of one device. It uses events by their own methods, as streams of ``torch.npu`` do."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        if not given:
            given = {"device": torch.device(NAME, index_of(device)), "priority": priority}
        return super().__new__(cls, **given)  # type: ignore[no-any-return, misc]

    @property
    def cuda_stream(self) -> int:
        """The handle that a vendor's library is given."""
        with stream(self):
            return int(library().standin_stream(self.device.index))

    def wait_event(self, event: Event | torch.Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event


class Event:
    """A point in a stream's work, for streams of this module alone.

    An event of ``torch.npu`` (2.14) reads what its own kind of stream has behind the fields of ``torch.Stream``; given
    a stream of ``torch.accelerator``, it reads what lies behind that in memory.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._event = torch.Event(
            torch.device(NAME), enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )

    def record(self, stream: Stream | None = None) -> None:
        self._event.record(_own(stream))

    def wait(self, stream: Stream | None = None) -> None:
        self._event.wait(_own(stream))

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, end_event: Event) -> float:
        return float(self._event.elapsed_time(end_event._event))


def _own(stream: Stream | None) -> Stream:
    """``stream``, or the current one. Raises ``TypeError`` for one of another kind."""
    if stream is None:
        return current_stream()
    if not isinstance(stream, Stream):
        raise TypeError(f"events of torch.{NAME} take its own streams, got {type(stream)}")
    return stream


def own_kind(found: torch.Stream) -> Stream:
    return Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)


def current_stream(device: Any = None) -> Stream:
    return own_kind(torch.accelerator.current_stream(torch.device(NAME, index_of(device))))


def default_stream(device: Any = None) -> Stream:
    like = current_stream(device)
    return Stream(stream_id=0, device_index=like.device_index, device_type=like.device_type)


def set_stream(stream: Any) -> None:
    if stream is not None:
        set_device(stream.device.index)
        torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: Any) -> Iterator[Any]:
    """Queue the work of a block on ``stream``; ``None`` leaves things as they are."""
    if stream is None:
        yield None
        return
    device, there = current_device(), current_stream(stream.device)
    set_stream(stream)
    try:
        yield stream
    finally:
        set_stream(there)
        set_device(device)


def _sleep(nanoseconds: int) -> None:
    """Occupy the current stream for so long."""
    checked(library().standin_sleep(int(nanoseconds)))


def is_current_stream_capturing() -> bool:
    return False


# ---------------------------------------------------------------- memory


def figures(index: int) -> tuple[int, int, int, int]:
    """Bytes of device ``index``: total, used, reserved, most ever used."""
    found = (ctypes.c_size_t * 4)()
    checked(library().standin_memory(index, found))
    return found[0], found[1], found[2], found[3]


def mem_get_info(device: Any = None) -> tuple[int, int]:
    total, _, reserved, _ = figures(index_of(device))
    return total - reserved, total


def memory_allocated(device: Any = None) -> int:
    return figures(index_of(device))[1]


def memory_reserved(device: Any = None) -> int:
    return figures(index_of(device))[2]


def max_memory_allocated(device: Any = None) -> int:
    return figures(index_of(device))[3]


max_memory_reserved = max_memory_allocated


def memory_stats(device: Any = None) -> dict[str, int]:
    _, used, reserved, peak = figures(index_of(device))
    return {
        f"{family}.all.{when}": value
        for family, present in (("allocated_bytes", used), ("reserved_bytes", reserved), ("active_bytes", used))
        for when, value in (("current", present), ("peak", peak))
    } | {"num_alloc_retries": 0, "num_ooms": 0, "allocation.all.current": 0}


def reset_peak_memory_stats(device: Any = None) -> None:
    checked(library().standin_reset_peak(index_of(device)))


def empty_cache() -> None:
    checked(library().standin_empty_cache(current_device()))


# ---------------------------------------------------------------- random numbers


class Generators:
    """The default generators of all devices, by number."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return with_interpreter().standin_generator(index_of(index))  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return device_count()


default_generators = Generators()


def manual_seed(seed: int) -> None:
    default_generators[None].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        default_generators[index].manual_seed(int(seed))


def initial_seed() -> int:
    return default_generators[None].initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return default_generators[device].get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    default_generators[device].set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# ---------------------------------------------------------------- the test's own view of the devices


def unpinned_asynchronous_copies() -> int:
    """Copies called asynchronous that named pageable memory of the host: they were not."""
    return int(library().standin_unpinned_asynchronous_copies())


def waiting_operators() -> list[str]:
    """Operators that made the host wait for the shape of their result."""
    return str(library().standin_waiting_operators().decode()).split()


def set_lateness(seconds: float | None) -> None:
    """Let this time pass between call and execution; ``None``: as much as is allowed."""
    library().standin_lateness(-1 if seconds is None else int(seconds * 1e9))


def register() -> types.ModuleType:
    """Make the devices known to torch, once, and return ``torch.standin``."""
    module = sys.modules[__name__]
    if vars(torch).get(NAME) is module:
        return module
    environment = os.environ
    devices = int(environment.get("STANDIN_DEVICES", "4"))
    checked(library().standin_configure(devices, device_bytes()))
    lateness = environment.get("STANDIN_LATENESS", "lazy")
    set_lateness(None if lateness == "lazy" else float(lateness))
    library().standin_explain_faults()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module
