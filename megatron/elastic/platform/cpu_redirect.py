"""Redirection of ``torch.cuda`` on a machine without CUDA.

Megatron asks for CUDA only at run time: device literals, streams, generators,
memory statistics, type names. Each name below is replaced once, before the first
megatron import (Megatron binds several by value), and every row says why. What
``torch_npu.contrib.transfer_to_npu`` does for Ascend, this does for the host.

Invariants
- ``torch.cuda.is_available()`` stays False: torch's own code and Megatron's
  optional GPU features go by it. Nothing pretends that a GPU exists.
- Only attributes are replaced, in torch's namespaces; :meth:`Redirection.undo`
  puts every original object back.
- Tensors asked for on ``cuda`` live on the CPU; there is one generator.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from megatron.elastic.platform import cpu_substitutes as sub
from megatron.elastic.platform.type_names import type_name

__all__ = ["ROWS", "Redirection", "RedirectionTooLate", "Row", "describe", "install", "installed"]

_MARK = "_elastic_redirection"
"""Attribute of ``torch.cuda`` that holds the redirection in force: the state lives where it applies."""


class RedirectionTooLate(RuntimeError):
    """Megatron was imported first, so names it bound by value can no longer be redirected."""


@dataclass(frozen=True)
class Row:
    """Names of one object and their replacement. ``make(original, name)`` gives the replacement."""

    owner: str
    names: tuple[str, ...]
    make: Callable[[Any, str], Any]
    reason: str

    def target(self) -> Any:
        """The object whose attributes are replaced."""
        return resolve(self.owner)


def resolve(path: str) -> Any:
    """``"torch.nn.Module"`` → the class: the longest importable prefix, then attributes."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def _constant(value: Any) -> Callable[[Any, str], Any]:
    return lambda original, name: _own_copy(value) if isinstance(value, FunctionType) else value


def _own_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    # torch._dynamo, where a module imports it, maps function objects to rules and asserts that none occurs twice.
    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return redirected


def _nothing(original: Any, name: str) -> Any:
    return _own_copy(sub.do_nothing)


def _wrap(wrapper: Callable[[Any], Any]) -> Callable[[Any, str], Any]:
    return lambda original, name: wrapper(original)


# A table: one row a line, which the formatter would break up.
# fmt: off
ROWS: tuple[Row, ...] = (
    Row("torch", ("compile",), _constant(sub.identity_compile),
        "megatron.core.jit binds it at import; without a GPU it costs seconds of start-up and gains nothing"),
    Row("torch.cuda", ("current_device",), _constant(sub.current_device),
        "Megatron passes the result as device=: the CPU device"),
    Row("torch.cuda", ("device_count",), _constant(sub.one_device),
        "Megatron seeds and builds its groups only if there is at least one device"),
    Row("torch.cuda", ("is_available",), _constant(sub.no),
        "stays False: a build with CUDA may ask device_count (PYTORCH_NVML_BASED_CUDA_CHECK), which is 1 here"),
    Row("torch.cuda", ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats",
                       "reset_max_memory_allocated", "set_stream", "_lazy_init", "init"), _nothing,
        "acts on a device or its cache: nothing is pending and nothing is cached"),
    Row("torch.cuda", ("_lazy_call",), _constant(sub.call_now),
        "queues work until CUDA starts: there is no such moment, so it runs at once"),
    Row("torch.cuda", ("device", "device_of"), _constant(sub.DeviceContext),
        "with torch.cuda.device(i): there is one device"),
    Row("torch.cuda", ("Stream", "ExternalStream"), _constant(sub.HostStream),
        "streams order device work: here a call has finished when it returns"),
    Row("torch.cuda", ("Event",), _constant(sub.HostEvent),
        "events mark device work: always complete, timed by the host clock"),
    Row("torch.cuda", ("stream",), _constant(sub.use_stream), "with torch.cuda.stream(s): one order of execution"),
    Row("torch.cuda", ("current_stream", "default_stream"), _constant(sub.the_stream),
        "the one order of execution"),
    Row("torch.cuda.nvtx", ("range_push", "range_pop", "range_start", "range_end", "mark"), _nothing,
        "annotates a GPU profiler's trace"),
    Row("torch.cuda", ("get_rng_state",), _constant(sub.get_rng_state), "the CUDA generator is the CPU's"),
    Row("torch.cuda", ("set_rng_state",), _constant(sub.set_rng_state), "the CUDA generator is the CPU's"),
    Row("torch.cuda.random", ("get_rng_state",), _constant(sub.get_rng_state), "the CUDA generator is the CPU's"),
    Row("torch.cuda.random", ("set_rng_state",), _constant(sub.set_rng_state), "the CUDA generator is the CPU's"),
    Row("torch.cuda", ("manual_seed", "manual_seed_all"), _constant(sub.manual_seed),
        "the CUDA generator is the CPU's"),
    Row("torch.cuda", ("default_generators",), _constant(sub.AnyIndexGenerators()),
        "Megatron's RNG tracker indexes it by current_device()"),
    Row("torch.cuda", ("memory_allocated", "memory_reserved", "device_memory_used"), _constant(sub.resident_bytes),
        "reads the allocator's books: here the resident set of this process"),
    Row("torch.cuda", ("max_memory_allocated", "max_memory_reserved"), _constant(sub.peak_resident_bytes),
        "reads the allocator's books: here the peak resident set of this process"),
    Row("torch.cuda", ("memory_stats",), _constant(sub.memory_stats),
        "Megatron logs four of its keys: resident and peak resident set, other keys 0"),
    Row("torch.cuda", ("mem_get_info",), _constant(sub.mem_get_info), "free and total: the machine's"),
    Row("torch.cuda", ("get_device_properties",), _constant(sub.device_properties),
        "name, total memory and cores of this machine; compute capability 0.0"),
    Row("torch.cuda", ("get_device_capability",), _constant(sub.device_capability),
        "compute capability 0.0: checks for GPU-only kernels then refuse them"),
    Row("torch.cuda", ("get_device_name",), _constant(sub.device_name), "name of this machine's processor"),
    Row("torch.cuda", ("is_current_stream_capturing",), _constant(sub.no), "no CUDA graphs"),
    Row("torch", ("tensor", "as_tensor", "empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm",
                  "arange", "linspace", "eye", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
                  "randn_like", "randint_like", "empty_strided", "scalar_tensor", "tril_indices", "triu_indices"),
        _wrap(sub.factory_on_cpu), 'device="cuda" literals and pin_memory=True in factory functions'),
    Row("torch.Tensor", ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full"),
        _wrap(sub.factory_on_cpu), 'device="cuda" literals in factory methods'),
    Row("torch.Tensor", ("to",), _wrap(sub.move_to_cpu), '.to("cuda") stays where it is'),
    Row("torch.Tensor", ("cuda",), _constant(sub.tensor_cuda), ".cuda() stays where it is"),
    Row("torch.Tensor", ("pin_memory",), _constant(sub.tensor_as_is), "page-locking is for DMA to a GPU"),
    Row("torch.Tensor", ("record_stream",), _nothing, "tells the GPU allocator which stream still reads"),
    Row("torch.Tensor", ("type",), _wrap(type_name("cpu")),
        "Megatron's optimizer compares type() with 'torch.cuda.FloatTensor': the result equals both names"),
    Row("torch.nn.Module", ("to", "to_empty"), _wrap(sub.move_to_cpu), '.to(device="cuda") stays where it is'),
    Row("torch.nn.Module", ("cuda",), _constant(sub.module_as_is), ".cuda() stays where it is"),
    Row("torch", ("load",), _wrap(sub.load_to_cpu), 'map_location="cuda"'),
    Row("torch", ("Generator",), _wrap(sub.generator_on_cpu), 'torch.Generator(device="cuda")'),
    Row("torch.optim.Adam", ("step",), _wrap(sub.step_without_dynamo), "its decorator imports torch._dynamo (seconds)"),
    Row("torch.optim.SGD", ("step",), _wrap(sub.step_without_dynamo), "its decorator imports torch._dynamo (seconds)"),
    Row("torch.utils.data", ("DataLoader",), _wrap(sub.loader_without_pinning),
        "Megatron's loaders ask for pin_memory=True; torch warns in every process and ignores it"),
)
# fmt: on


def describe() -> Iterator[tuple[str, str]]:
    """(qualified name, reason) of every redirected name."""
    for row in ROWS:
        for name in row.names:
            yield f"{row.owner}.{name}", row.reason
    for owner, names in sub.DYNAMO_FREE:
        for name in names:
            yield f"{owner}.{name}", "first call would import torch._dynamo (seconds) only to switch it off"
    yield sub.RNG_LOGGER, "drops one warning: with one generator the 'CPU RNG state' does change within a fork"
    yield f"warning {sub.NO_KERNELS}", "said by six modules in every rank: the substitution table says it once"
    yield f"warning {sub.RENAMED}", "said by every rank of names that Megatron calls: nothing a user can change"
    yield f"environment {sub.LAUNCH_ORDER}", "Megatron asserts 1 so that CUDA launches keep their order; set if unset"


class Redirection:
    """The replaced names of this process and their originals."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []
        self._side_effects: list[Callable[[], None]] = []

    def apply(self) -> None:
        """Replace every name of :data:`ROWS` that this torch has."""
        for row in ROWS:
            owner = row.target()
            for name in row.names:
                if name in vars(owner) or hasattr(owner, name):
                    self._replace(owner, name, row.make)
        self._side_effects += [sub.dynamo_free(resolve), sub.silence_rng_warning(), sub.order_launches()]
        self._side_effects.append(sub.silence_upstream_warnings())

    def _replace(self, owner: Any, name: str, make: Callable[[Any, str], Any]) -> None:
        # An inherited attribute (torch.Tensor's methods) is shadowed, and the shadow removed on undo.
        self._originals.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, make(getattr(owner, name), name))

    def undo(self) -> None:
        """Put every original back, last replaced first. Idempotent."""
        while self._side_effects:
            self._side_effects.pop()()
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        if installed() is self:
            delattr(torch.cuda, _MARK)


_MISSING = object()


def installed() -> Redirection | None:
    """The redirection in force, if any."""
    found = getattr(torch.cuda, _MARK, None)
    return found if isinstance(found, Redirection) else None


def install() -> Redirection:
    """Redirect, once: a second call returns the redirection in force.

    Raises :class:`RedirectionTooLate` when megatron.core was imported before.
    """
    present = installed()
    if present is not None:
        return present
    if "megatron.core" in sys.modules:
        raise RedirectionTooLate(
            "megatron.core was imported before megatron.elastic redirected torch.cuda: "
            "make `import megatron.elastic.adaptor` the first line of the script"
        )
    redirection = Redirection()
    redirection.apply()
    setattr(torch.cuda, _MARK, redirection)
    return redirection
