"""``torch.cuda`` on the stand-in devices, redirected as ``torch_npu.contrib.transfer_to_npu`` does for Ascend.

The same names are replaced and no others, so code that runs here needs no more on Ascend:

- functions of ``torch.cuda`` and of ``torch.cuda.random`` by those of the device's module that have the same name;
- ``device``, ``device_type``, ``map_location`` and ``device_id`` arguments that name CUDA, of factory functions, of
  ``Tensor.to`` and of ``Module.to``; there an integer is a device as well;
- ``Tensor.cuda``, ``Tensor.is_cuda``, ``Module.cuda``; pinned memory of data loaders; the backend ``nccl``;
- ``torch.jit.script`` returns what it is given, and Triton is said to be missing.

A job of one process without ``--elastic`` gets a group of one for the devices too, so that plain Megatron with its own
optimizer runs there; larger ones would need a library of their own.

``torch.compile`` is left alone by that module; the device compiles nothing, so here it returns what it is given.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import torch

from tests.standin.device import NAME, register

__all__ = ["install"]

FACTORIES = (
    "logspace", "randint", "hann_window", "rand", "full_like", "ones_like", "rand_like", "randperm", "arange",
    "frombuffer", "normal", "empty_strided", "empty_like", "scalar_tensor", "tril_indices", "ones", "randn", "tensor",
    "triu_indices", "as_tensor", "zeros", "randint_like", "full", "eye", "empty", "zeros_like", "range", "randn_like",
    "linspace", "_pin_memory", "autocast", "load", "Generator", "set_default_device",
)  # fmt: skip
TENSOR_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "to")
MODULE_METHODS = ("to", "to_empty")
KEYWORDS = ("device", "device_type", "map_location", "device_id")


def renamed(value: Any, integers: bool = False) -> Any:
    """``value`` with CUDA's name replaced, if it is a device or a map of devices."""
    if isinstance(value, str):
        return value.replace("cuda", NAME)
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device(NAME) if value.index is None else torch.device(NAME, value.index)
    if integers and type(value) is int:
        return f"{NAME}:{value}"
    if isinstance(value, dict):
        return {renamed(key): renamed(item) for key, item in value.items()}
    return value


def with_devices(function: Callable[..., Any], integers: bool = False) -> Callable[..., Any]:
    """``function`` with device arguments renamed; with ``integers`` also where they are numbers by position."""

    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        for keyword in KEYWORDS:
            if kwargs.get(keyword) is not None:
                kwargs[keyword] = renamed(kwargs[keyword], integers=True)
        return function(*(renamed(arg, integers) if _names_device(arg, integers) else arg for arg in args), **kwargs)

    return redirected


def _names_device(value: Any, integers: bool) -> bool:
    return isinstance(value, str | torch.device) or (integers and type(value) is int)


def _loader(original: type[Any]) -> Callable[..., Any]:
    @functools.wraps(original.__init__)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("pin_memory") and not kwargs.get("pin_memory_device"):
            kwargs["pin_memory_device"] = NAME
        begin_original(self, *args, **kwargs)

    begin_original = original.__init__
    return begin


def _script(item: Any = None, *_: Any, **__: Any) -> Any:
    return item


def _compile(model: Any = None, **_: Any) -> Any:
    return model if model is not None else _script


def _alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """``init_process_group`` that gives a world of one a backend for the devices: torch's, which moves nothing."""

    @functools.wraps(original)
    def begin(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("world_size") == 1:
            importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers "fake"
            kwargs["backend"] = f"cpu:gloo,{NAME}:fake"
        return original(*args, **kwargs)

    return begin


def install() -> None:
    """Redirect, once a process."""
    module = register()
    if getattr(torch.cuda, "_redirected_to", None) == NAME:
        return
    for owner in (torch.cuda, torch.cuda.random):
        for name, value in vars(module).items():
            if not name.startswith("__") and hasattr(owner, name) and not isinstance(value, types.ModuleType):
                setattr(owner, name, value)
    torch.cuda._redirected_to = NAME  # type: ignore[attr-defined]
    owners: tuple[tuple[Any, tuple[str, ...], bool], ...] = (
        (torch, FACTORIES, False),
        (torch.Tensor, TENSOR_METHODS, False),
        (torch.nn.Module, MODULE_METHODS, True),
    )
    for owner, names, integers in owners:
        for name in names:
            original = getattr(owner, name)
            setattr(owner, name, _generator(original) if name == "Generator" else with_devices(original, integers))
    torch.Tensor.to = with_devices(torch.Tensor.to, integers=True)  # type: ignore[method-assign]
    torch.Tensor.cuda = getattr(torch.Tensor, NAME)  # type: ignore[method-assign]
    torch.Tensor.is_cuda = getattr(torch.Tensor, f"is_{NAME}")
    torch.nn.Module.cuda = getattr(torch.nn.Module, NAME)  # type: ignore[method-assign]
    torch.utils.data.DataLoader.__init__ = _loader(torch.utils.data.DataLoader)  # type: ignore[method-assign]
    torch.jit.script = _script  # type: ignore[assignment]
    torch.compile = _compile
    torch.distributed.init_process_group = _alone(torch.distributed.init_process_group)


def _generator(original: type[torch.Generator]) -> type[torch.Generator]:
    """``torch.Generator`` that takes CUDA's name; ``isinstance`` goes by the original."""

    class Meta(type):
        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            return original(renamed(device))

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    return Meta("Generator", (), {})  # type: ignore[return-value]
