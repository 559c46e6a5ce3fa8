"""Everything a user can set, in one dataclass.

Each field becomes one ``--elastic-*`` flag (``mcore/arguments.py`` derives the
flags, ``docs/flags.md`` is generated); the string under a field is its help
text. Nothing outside ``mcore`` and ``launch`` sees argparse: the engine is
handed an :class:`ElasticConfig`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, Union, get_args, get_origin

__all__ = ["ConfigError", "ElasticConfig", "flag_name", "plain_type"]

STEPS_BEFORE_MIGRATION = 50
"""What a lost rank has to return before its layers move, unless a flag says otherwise."""


class ConfigError(ValueError):
    """Settings that cannot be honoured; each text names the flag and the fix."""

    def __init__(self, *texts: str) -> None:
        super().__init__("; ".join(texts))
        self.texts = texts


def flag_name(field_name: str) -> str:
    """``"mirror_count"`` → ``"--elastic-mirror-count"``."""
    return "--elastic-" + field_name.replace("_", "-")


def plain_type(annotation: Any) -> Any:
    """``str | None`` → ``str``; anything else as it is."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(part for part in get_args(annotation) if part is not type(None))
    return annotation


@dataclass(frozen=True)
class ElasticConfig:
    """Settings of the elastic runtime (durations in seconds, sizes in bytes)."""

    comm: Literal["elastic", "gloo"] = "elastic"
    """Communicator: 'elastic' edits groups in place over native links; 'gloo' rebuilds every group (the baseline)."""

    transport: Literal["auto", "shm", "tcp"] = "auto"
    """Links between ranks of one host: shared memory, TCP, or shared memory where the mount has room."""

    mirrors: int = 1
    """Copies of every optimizer state block besides the owner's. 2 is recommended where losses are correlated."""

    domain: str | None = None
    """What fails together with this node: names from the outermost on, e.g. 'rack7/host12'. Copies of a block go to
    different racks, then to different nodes. Left out: MEGATRON_ELASTIC_DOMAIN of the node's environment, else its
    machine (boot id)."""

    scatter_width: int = 4
    """Over how many peers one owner's mirrors are spread (at most the group's size less one)."""

    ownership: Literal["interleaved", "contiguous"] = "interleaved"
    """How optimizer state is dealt over a data-parallel group: every layer over all ranks, or whole stages in one cut
    as Megatron's distributed optimizer does (moves more when layers move; for comparison)."""

    block_bytes: int = 1 << 18
    """Upper bound on the fp32 bytes of one state block, the granule of ownership, copies and transfers."""

    snapshot: Literal["gradient", "state"] = "gradient"
    """How mirrors follow their owner: replaying the step from the reduced gradient, or receiving stepped state."""

    policy: Literal["elaswave", "recycle", "torchft", "torchft-batch", "mindspeed", "spares"] = "elaswave"
    """What is done without a lost rank: 'elaswave' and 'recycle' hand its samples to peers of its stage, 'torchft'
    drops its replica and lets the batch shrink, 'torchft-batch' keeps the batch, 'mindspeed' one replica, once;
    'spares' ends the job when no spare is ready (--elastic-spares)."""

    schedule: Literal["1f1b", "zero-bubble"] = "1f1b"
    """Pipeline schedule: Megatron's, or ZB-H1: weight gradients fill the bubbles (same gradients, more activations)."""

    fail_slow: Literal["auto", "on", "off"] = "auto"
    """Give ranks that are slower than their peers fewer samples; auto: where every rank has a processor to itself."""

    frequency: str = "off"
    """Run devices with slack at lower clocks: 'auto', or KIND:DEVICE[:LIBRARY], e.g. 'nvml:{local_rank}'; 'off'."""

    exact: bool = False
    """Weights of a disturbed run are bitwise those of an undisturbed one (slower)."""

    secret_file: str | None = None
    """File with the job's secret, at least 32 hex digits (openssl rand -hex 16), readable by its owner alone, the same
    on every node. Needed for several nodes and with etcd, unless MEGATRON_ELASTIC_SECRET holds the secret itself."""

    detection_timeout: float = 1.0
    """Seconds from which all time-outs are derived: a stopped process is killed after half of it, an agent not heard of
    counts as lost after ten times, a hang is looked for after thirty (docs/operations.md has them all)."""

    max_losses_per_hour: int = 0
    """End the job when more ranks than this are lost within an hour (0: no limit)."""

    quarantine_after: int = 3
    """A node that lost ranks so many times more within an hour than the median of the other nodes is left out: its lost
    ranks are started again after 60 × --elastic-detection-timeout, doubled each further time up to an hour, or when
    the others cannot go on without them (0: never)."""

    respawn: bool = True
    """Start a lost worker again and let it rejoin at a step boundary."""

    migrate_after: int | None = None
    """Steps after a loss before layers move to other workers (left out: 50 while the lost one is being started again,
    at once with --no-elastic-respawn; -1: layers never move)."""

    mean_time_between_losses: float = 3600.0
    """Seconds until somebody is expected to be lost or to return: layers move only where more steps get done by then,
    or by the end of the run if that comes first."""

    migration: Literal["background", "blocking"] = "background"
    """How state changes place: while steps go on, or at one boundary while everybody waits (for comparison)."""

    spares: int = 0
    """So many of the ranks that are launched, the last ones, wait with open links to take a lost rank's place at once
    (a multiple of the tensor-parallel size)."""

    verify_interval: int = 100
    """Steps between rolling comparisons of owner and mirror hashes (0: never)."""

    background_save: bool = True
    """Write checkpoints while training goes on; otherwise each save is finished before the next step."""

    strict_flags: bool = False
    """Refuse Megatron flags that would have to be substituted on this platform instead of substituting them."""

    check: bool = False
    """Print everything that would be refused, substituted or without effect, then end before anything is built or
    written: exit status 0 when the job would start, 1 when it would be refused. Under the launcher one process is
    enough: no other node is waited for."""

    print_patches: bool = False
    """Print every name replaced in megatron.training and megatron.core, then go on."""

    event_log: str | None = None
    """Directory for one JSON line an event: generations, losses, plans, phases, certificates, what can be lost."""

    trace: bool = False
    """Log when each phase and computation ran; python -m megatron.elastic.observe.run_trace draws them."""

    inject: str | None = None
    """Faults on demand, e.g. 'kill:rank=2,step=5,point=after_reduce'; needs --elastic-allow-inject."""

    allow_inject: bool = False
    """Allow --elastic-inject; without it a fault script is refused."""

    def __post_init__(self) -> None:
        faults = tuple(self._faults())
        if faults:
            raise ConfigError(*faults)

    def _faults(self) -> Iterator[str]:
        if self.mirrors < 0:
            yield "--elastic-mirrors must be 0 or more"
        if self.scatter_width < 1:
            yield "--elastic-scatter-width must be 1 or more"
        if self.block_bytes < 1024 or self.block_bytes % 64:
            yield "--elastic-block-bytes must be a multiple of 64 and at least 1024"
        if self.spares < 0:
            yield "--elastic-spares must be 0 or more"
        if self.quarantine_after < 0:
            yield "--elastic-quarantine-after must be a number of losses, or 0 for never"
        if self.steps_before_migration < -1:
            yield "--elastic-migrate-after must be a number of steps, or -1 for never"
        if not 0 < self.mean_time_between_losses < float("inf"):
            yield "--elastic-mean-time-between-losses must be a number of seconds above 0"
        if self.detection_timeout <= 0:
            yield "--elastic-detection-timeout must be above 0"
        if self.frequency not in ("off", "auto") and self.frequency.split(":")[0] not in ("nvml", "dcmi", "cpufreq"):
            yield "--elastic-frequency must be off, auto, or KIND:DEVICE (nvml, dcmi, cpufreq)"
        if self.trace and not self.event_log:
            yield "--elastic-trace needs --elastic-event-log DIR to write to"
        if self.inject and not self.allow_inject:
            yield "--elastic-inject needs --elastic-allow-inject (it kills workers on purpose)"

    @property
    def steps_before_migration(self) -> int:
        """Steps after a loss before layers move; -1: they never do."""
        if self.migrate_after is not None:
            return self.migrate_after
        return STEPS_BEFORE_MIGRATION if self.respawn else 0

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Names of all settings, in order of declaration."""
        return tuple(field.name for field in fields(cls))
