"""Substitutes on a CPU for the redirected names of ``torch.cuda`` (table: ``cpu_redirect``).

Each function keeps the signature's shape that Megatron calls and answers truly:
memory figures are this process's, events are timed by the host clock, the one
generator is torch's CPU generator.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import platform as host
import warnings
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch

from megatron.elastic.platform.host_memory import machine_memory, process_memory
from megatron.elastic.platform.streams import HostEvent, HostStream, use_stream

# A table: one row a line, which the formatter would break up.
# fmt: off
__all__ = [
    "DYNAMO_FREE", "LAUNCH_ORDER", "NO_KERNELS", "RENAMED", "RNG_LOGGER", "AnyIndexGenerators", "DeviceContext",
    "HostEvent", "HostStream", "call_now", "current_device", "device_capability", "device_name",
    "device_properties", "do_nothing", "dynamo_free", "factory_on_cpu", "generator_on_cpu", "get_rng_state",
    "identity_compile", "load_to_cpu", "loader_without_pinning", "manual_seed", "mem_get_info", "memory_stats",
    "module_as_is", "move_to_cpu", "no", "one_device", "order_launches", "peak_resident_bytes", "resident_bytes",
    "set_rng_state", "silence_rng_warning", "silence_upstream_warnings", "step_without_dynamo", "tensor_as_is",
    "tensor_cuda", "the_stream", "use_stream",
]
# fmt: on

_CPU = torch.device("cpu")

# ---------------------------------------------------------------- devices


def do_nothing(*_: object, **__: object) -> None:
    """For calls that only order or trace GPU work."""


def no(*_: object, **__: object) -> bool:
    return False


def current_device() -> torch.device:
    return _CPU


def one_device() -> int:
    return 1


def call_now(function: Callable[..., object], **_: object) -> None:
    function()


def the_stream(device: object = None) -> HostStream:
    return HostStream()


class DeviceContext:
    """``with torch.cuda.device(i)``."""

    def __init__(self, device: object = None) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def device_properties(device: object = None) -> SimpleNamespace:
    total, _ = machine_memory()
    return SimpleNamespace(
        name=device_name(), major=0, minor=0, total_memory=total, multi_processor_count=os.cpu_count() or 1
    )


def device_capability(device: object = None) -> tuple[int, int]:
    return (0, 0)


def device_name(device: object = None) -> str:
    return host.processor() or host.machine()


def identity_compile(model: Any = None, **_: object) -> Any:
    """``torch.compile`` as function, decorator, or decorator factory: returns what it is given."""
    return model if model is not None else (lambda function: function)


# ---------------------------------------------------------------- generators


def get_rng_state(device: object = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


class AnyIndexGenerators:
    """``torch.cuda.default_generators``: the CPU generator under any index."""

    def __getitem__(self, index: object) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


RNG_LOGGER = "megatron.core.tensor_parallel.random"


class _OneGenerator(logging.Filter):
    """Drops the warning about a CPU generator that moved: here it is also the device's."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def silence_rng_warning() -> Callable[[], None]:
    """Filter that one message; returns the undo."""
    logger, rule = logging.getLogger(RNG_LOGGER), _OneGenerator()
    logger.addFilter(rule)
    return functools.partial(logger.removeFilter, rule)


# ---------------------------------------------------------------- memory


def resident_bytes(device: object = None) -> int:
    return process_memory()[0]


def peak_resident_bytes(device: object = None) -> int:
    return process_memory()[1]


def mem_get_info(device: object = None) -> tuple[int, int]:
    total, free = machine_memory()
    return free, total


def memory_stats(device: object = None) -> dict[str, int]:
    """The byte counters Megatron logs; counters that have no meaning here read 0."""
    resident, peak = process_memory()
    stats: dict[str, int] = defaultdict(int)
    for family in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{family}.all.current"] = resident
        stats[f"{family}.all.peak"] = peak
    return stats


# ---------------------------------------------------------------- tensors and modules


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def factory_on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """``factory`` with ``device="cuda"`` (or an ordinal) and ``pin_memory=True`` taken off."""

    @functools.wraps(factory)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and (_is_cuda(device) or isinstance(device, int)):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return redirected


def move_to_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.to`` / ``Module.to`` with the CPU in place of a CUDA device or ordinal."""

    @functools.wraps(method)
    def redirected(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and (_is_cuda(args[0]) or type(args[0]) is int):
            args = (_CPU, *args[1:])
        device = kwargs.get("device")
        if device is not None and (_is_cuda(device) or isinstance(device, int)):
            kwargs["device"] = _CPU
        return method(self, *args, **kwargs)

    return redirected


def tensor_cuda(
    self: torch.Tensor, device: object = None, non_blocking: bool = False, memory_format: object = None
) -> torch.Tensor:
    return self


def tensor_as_is(self: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return self


def module_as_is(self: torch.nn.Module, device: object = None) -> torch.nn.Module:
    return self


def load_to_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.load`` with ``map_location="cuda"`` read as the CPU."""

    @functools.wraps(load)
    def redirected(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(f, _CPU if _is_cuda(map_location) else map_location, *args, **kwargs)

    return redirected


def generator_on_cpu(original: type[torch.Generator]) -> type[torch.Generator]:
    """``torch.Generator`` that reads a CUDA device as the CPU; ``isinstance`` goes by the original."""

    class _Meta(type(original)):  # type: ignore[misc]
        def __call__(cls, device: object = _CPU) -> torch.Generator:
            return original(_CPU if _is_cuda(device) else device)  # type: ignore[arg-type]

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    return _Meta("Generator", (), {"__doc__": original.__doc__})


def loader_without_pinning(original: type[Any]) -> type[Any]:
    """``DataLoader`` with ``pin_memory`` off."""

    class DataLoader(original):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["pin_memory"] = False
            super().__init__(*args, **kwargs)

    return DataLoader


# ---------------------------------------------------------------- dynamo and environment

DYNAMO_FREE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("torch.optim.Optimizer", ("add_param_group", "load_state_dict", "state_dict", "zero_grad")),
    ("torch.utils.checkpoint", ("checkpoint",)),
    ("torch.utils.checkpoint.CheckpointFunction", ("forward", "backward")),
)
"""Functions torch wraps in ``_disable_dynamo``: their first call imports torch._dynamo."""


def step_without_dynamo(decorated: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's ``step`` as torch decorates it, less the graph breaks that nothing here compiles."""
    plain = inspect.unwrap(decorated)

    @functools.wraps(plain)
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(bool(self.defaults["differentiable"])):
            return plain(self, *args, **kwargs)

    return step


_CACHED = "__dynamo_disable"
"""Where ``_disable_dynamo`` caches what it calls; the plain function does as well."""


def dynamo_free(resolve: Callable[[str], Any]) -> Callable[[], None]:
    """Let the wrappers call the function itself; returns the undo."""
    touched: list[Any] = []
    for owner, names in DYNAMO_FREE:
        for name in names:
            inner = getattr(getattr(resolve(owner), name), "__wrapped__", None)
            if inner is not None and not hasattr(inner, _CACHED):
                setattr(inner, _CACHED, inner)
                touched.append(inner)

    def undo() -> None:
        for inner in touched:
            delattr(inner, _CACHED)

    return undo


LAUNCH_ORDER = "CUDA_DEVICE_MAX_CONNECTIONS"


def order_launches() -> Callable[[], None]:
    """Set Megatron's launch-order variable where the user has not; returns the undo."""
    if LAUNCH_ORDER in os.environ:
        return do_nothing
    os.environ[LAUNCH_ORDER] = "1"

    def undo() -> None:
        os.environ.pop(LAUNCH_ORDER, None)

    return undo


NO_KERNELS = r"(Transformer Engine and Apex are|Apex is) not installed"
RENAMED = r"`torch\.distributed\.\w+` is deprecated"


def silence_upstream_warnings() -> Callable[[], None]:
    """Filter warnings of every rank that only Megatron's authors can act on; returns the undo."""
    rules: list[object] = []
    for message, category in ((NO_KERNELS, UserWarning), (RENAMED, FutureWarning)):
        warnings.filterwarnings("ignore", message=message, category=category)
        rules.append(warnings.filters[0])

    def undo() -> None:
        for rule in rules:
            with contextlib.suppress(ValueError):
                cast("list[object]", warnings.filters).remove(rule)

    return undo
