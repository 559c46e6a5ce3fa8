"""Objects that the phases of a step work with: those of the process, and the input of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.compute.exact_gradients import ExactGradients
from megatron.elastic.engine.compute.message_memory import MessageMemory
from megatron.elastic.engine.compute.model_interface import ForwardStep, ModelInterface
from megatron.elastic.engine.compute.piece_times import HOST_CLOCK, Clock
from megatron.elastic.engine.compute.samples import SampleSource, StepAddress
from megatron.elastic.engine.settings import Settings
from megatron.elastic.observe.timeline import Timeline
from megatron.elastic.platform.threads import OS_THREADS, Threads
from megatron.elastic.state.layout import UnitLayout
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.relocation import Relocation

__all__ = ["StepInput", "Tools"]


@dataclass(frozen=True)
class Tools:
    """The objects that every phase uses; they live as long as the process."""

    interface: ModelInterface
    arena: Arena
    pool: StatePool
    messages: MessageMemory
    """The memory of messages to and from mirrors."""
    layouts: Mapping[tuple[int, int], UnitLayout]
    fabric: Fabric
    settings: Settings
    reach: Callable[[str, int], None]
    """Fault injection: (point, step)."""
    publish: Callable[[str, tuple[int, ...]], None]
    """Activity for hang detection: (phase, waiting for)."""
    drag: Callable[[int, Callable[[], int]], None]
    """Fault injection: (step, nanoseconds of the last computation); a slowed rank sleeps in proportion."""
    timeline: Timeline = field(default_factory=Timeline)
    """Records the times of this process's actions, if tracing is on."""
    steady_clock: bool = True
    """True if this process has its processor or device to itself, so that times of pieces measure the rank's speed."""
    clock: Clock = HOST_CLOCK
    """Measures the pieces' computations."""
    exact: ExactGradients | None = None
    """The gradient sums of exact mode; None in the default mode."""
    threads: Threads = OS_THREADS
    relocation: Relocation | None = None
    """Moves copies between host and device as roles change; None where owners lie in host memory."""


@dataclass(frozen=True)
class StepInput:
    """The input of a step; ``step`` is the version that it produces."""

    step: int
    address: StepAddress
    forward_step: ForwardStep
    source: SampleSource | None
    left_out: bool = False
    """True if its samples are consumed and nothing is computed from them."""
