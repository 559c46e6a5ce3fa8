"""All user settings of the elastic runtime, in one dataclass.

Each field becomes one ``--elastic-*`` flag (``mcore/args/arguments.py`` derives the
flags, ``docs/flags.md`` is generated); the string under a field is its help
text. Only ``mcore`` and ``launch`` use argparse: the engine receives an
:class:`ElasticConfig`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

__all__ = [
    "LONGEST_SECONDS",
    "LOOPBACK",
    "ConfigError",
    "ElasticConfig",
    "HealthSetting",
    "flag_name",
    "health_settings",
    "is_web_url",
    "notice_source",
    "plain_type",
    "web_address",
]

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that no other host reaches."""
LONGEST_SECONDS = 1e9
"""The longest time that a setting may name: some thirty years. In nanoseconds it fits an integer of 64 bits."""
DETECTION_SECONDS = 0.01, 3600.0
"""The least and the longest ``--elastic-detection-timeout``. Agents look at their workers five times in it."""
STEPS_BEFORE_MIGRATION = 50
"""Default number of steps within which a lost rank may return before its layers move."""


class ConfigError(ValueError):
    """Invalid settings; each text names the flag and the fix."""

    def __init__(self, *texts: str) -> None:
        super().__init__("; ".join(texts))
        self.texts = texts


def web_address(text: str) -> tuple[str, int]:
    """Return host and port of ``[ADDRESS:]PORT``; loopback without an address. Raises ``ValueError``."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16) or (":" in text and not host):
        raise ValueError(f"no [ADDRESS:]PORT: {text!r}")
    return host.strip("[]") or LOOPBACK[0], int(port)


def is_web_url(text: str) -> bool:
    """Return whether ``text`` is an http or https URL with a host."""
    try:
        found = urlsplit(text)
        return found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        return False


def notice_source(text: str) -> tuple[str, str]:
    """Return kind and address of ``KIND``, ``KIND=URL`` or ``URL``; an empty address is the usual one.

    Raises ``ValueError``.
    """
    kind, equals, base = text.partition("=")
    if kind in ("aws", "gcp", "azure") and (is_web_url(base) if equals else True):
        return kind, base
    if is_web_url(text):
        return "url", text
    raise ValueError(f"no source of notices: {text!r}")


@dataclass(frozen=True)
class HealthSetting:
    """One check of ``--elastic-health``."""

    kind: Literal["gpu", "network", "disk", "clock"]
    names: tuple[str, ...] = ()
    """``network``: the interfaces; empty: all that are up at the start."""
    path: str = ""
    """``disk``: the folder; ``gpu``: the vendor's library instead of the usual one."""
    free: int = 0
    """``disk``: bytes that must be free."""


def health_settings(text: str) -> tuple[HealthSetting, ...]:
    """Return the checks of ``gpu[=LIBRARY],network[=NAME+NAME],disk=FOLDER[:GIB],clock``. Raises ``ValueError``."""
    return tuple(_health_setting(part) for part in text.split(","))


def _health_setting(text: str) -> HealthSetting:
    kind, equals, value = text.partition("=")
    if equals and not value:
        raise ValueError(f"nothing after = in {text!r}")
    if kind == "gpu":
        return HealthSetting("gpu", path=value)
    if kind == "network":
        return HealthSetting("network", names=tuple(value.split("+")) if value else ())
    if kind == "disk" and value:
        folder, colon, size = value.rpartition(":")
        if colon and size.isascii() and size.isdecimal():
            return HealthSetting("disk", path=folder, free=int(size) << 30)
        return HealthSetting("disk", path=value)
    if kind == "clock" and not equals:
        return HealthSetting("clock")
    raise ValueError(f"no check: {text!r}")


def flag_name(field_name: str) -> str:
    """Return ``"--elastic-mirror-count"`` for ``"mirror_count"``."""
    return "--elastic-" + field_name.replace("_", "-")


def plain_type(annotation: Any) -> Any:
    """Return ``str`` for ``str | None``, and any other type unchanged."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(part for part in get_args(annotation) if part is not type(None))
    return annotation


@dataclass(frozen=True)
class ElasticConfig:
    """Settings of the elastic runtime (durations in seconds, sizes in bytes)."""

    comm: Literal["elastic", "gloo"] = "elastic"
    """Communicator between ranks. 'elastic': links of its own, groups edited in place after a loss. 'gloo': torch's,
    every group built anew after a loss; slower, for comparison."""

    transport: Literal["auto", "shm", "tcp"] = "auto"
    """Links between ranks of one host. 'shm': shared memory. It is anonymous: /dev/shm may be small.
    'tcp': TCP. 'auto': shared memory, or TCP where none is left."""

    mirrors: int = 1
    """Copies of each block of optimizer state on other ranks, besides the owner's. 1 survives the loss of any one rank,
    2 of any two. Use 2 where several ranks fail together."""

    domain: str | None = None
    """Failure domains of this node, outermost first, e.g. 'rack7/host12'. Copies of a block go to different racks, then
    to different nodes. Default: MEGATRON_ELASTIC_DOMAIN of the node's environment, else the machine (boot id). Set it
    where nodes of one rack fail together."""

    scatter_width: int = 4
    """Number of ranks over which the copies of one owner's blocks are spread, at most all others of its data-parallel
    group. With more, each rank holds fewer copies, but two losses more often share a block."""

    ownership: Literal["interleaved", "contiguous"] = "interleaved"
    """Division of optimizer state over a data-parallel group. 'interleaved': each layer over all ranks. 'contiguous':
    each stage in one cut, like Megatron's distributed optimizer. It moves more state when layers move; use it for
    comparison."""

    block_bytes: int | None = None
    """Largest size of one block of optimizer state, in bytes of fp32. Blocks are owned, copied and moved whole.
    Default: a 64th of a tensor-parallel rank's part of a layer, a quarter of an expert; from 256 KiB to 64 MiB."""

    snapshot: Literal["gradient", "state"] = "gradient"
    """Update of the copies of a block. 'gradient': copies receive the reduced gradient and compute the same update.
    'state': copies receive the updated state, which is more traffic."""

    overlap: Literal["none", "reduce", "gather", "both"] = "none"
    """Communication that goes on behind computation. 'reduce': gradients are reduced, and sent to their copies, behind
    the backward. 'gather': parameters are gathered behind the next forward. 'both', 'none'. Megatron's
    --overlap-grad-reduce and --overlap-param-gather set it too. Use it where communication does not take processor time
    from computation. Exact mode reduces gradients after the backward all the same."""

    bucket_elements: int = 1 << 20
    """With --elastic-overlap: number of elements that are reduced, sent or gathered together at least, in whole layers.
    Smaller buckets begin earlier; each costs some hundred microseconds. Megatron's --ddp-bucket-size sets it too."""

    state: Literal["auto", "host", "device"] = "auto"
    """Memory of the optimizer state that a rank owns. 'device': that of its accelerator, where it is also stepped;
    copies on other ranks stay in host memory. 'host': host memory, which leaves the device's to the model. 'auto':
    'device' on accelerators on which it fits beside the model, else 'host'."""

    policy: str = "elaswave"
    """Policy for the samples of a lost rank."""

    tensor: Literal["auto", "live-on", "park"] = "auto"
    """Ranks of a tensor-parallel group that has lost a rank. 'live-on': they go on as a smaller group, with larger
    parts of its layers each. 'park': they wait until it is back, and hold state only. 'auto': 'live-on' where the
    model, the policy and exact mode let them, otherwise 'park'."""

    schedule: Literal["1f1b", "zero-bubble"] = "1f1b"
    """Pipeline schedule. '1f1b': Megatron's. 'zero-bubble': ZB-H1, which computes weight gradients where ranks would
    wait; same gradients, more memory for activations."""

    fail_slow: Literal["auto", "on", "off"] = "auto"
    """Give slower ranks fewer samples. 'auto': where each rank has a processor or a device of its own."""

    frequency: str = "off"
    """Lower the clocks of devices that wait for others. 'auto': by the library of the platform. KIND:DEVICE[:LIBRARY]:
    by this library, e.g. 'nvml:{local_rank}'; kinds are nvml, dcmi and cpufreq. 'off': clocks do not change."""

    frequency_boost: bool = False
    """While ranks are missing, let --elastic-frequency also raise clocks above those of before the job, and the power
    limits of NVIDIA GPUs to the highest that these allow. Use it where power supply and cooling bear it."""

    exact: bool = False
    """Make the final weights those of a run without losses, bit by bit. Slower; devices need --deterministic-mode."""

    secret_file: str | None = None
    """File with the job's secret, at least 32 hex digits (openssl rand -hex 16), readable by its owner alone, the same
    on every node. Required for several nodes and with etcd, unless MEGATRON_ELASTIC_SECRET holds the secret itself."""

    detection_timeout: float = 1.0
    """Unit of all time-outs, from 0.01 to 3600 seconds: a stopped process is killed after 0.5 times this, a silent node
    counts as lost after 10 times, a hang is searched for after 30 times (docs/operations.md lists all). Raise it where
    machines stall for seconds."""

    max_losses_per_hour: int = 0
    """Largest number of ranks that may be lost within an hour; with one more the job ends. 0: no limit."""

    quarantine_after: int = 3
    """Number of losses by which a node must exceed the median of the other nodes within an hour to be quarantined. Its
    lost ranks are then started again only after 60 times --elastic-detection-timeout (doubled each further time, up to
    an hour), or when training cannot go on without them. 0: never."""

    respawn: bool = True
    """Start lost ranks again; they rejoin at a step boundary. Without it the job goes on with the remaining ranks."""

    migrate_after: int | None = None
    """Steps after a loss before layers move to other ranks. Default: 50 while the lost rank is being started again, 0
    with --no-elastic-respawn. -1: layers never move."""

    expert_balance: Literal["off", "homes", "replicas", "lazarus"] = "off"
    """Whether experts move between ranks by their measured load, where ranks share experts
    (--expert-model-parallel-size above 1). 'homes': each rank has as many experts as before, chosen so that all
    receive about the same number of tokens. 'replicas': also several ranks compute a hot expert, each some of its
    tokens. 'lazarus': replicas as Lazarus allocates and places them (arXiv 2407.04656), which keep experts through
    losses more than they even the load. 'off': experts move after losses only. Use it where routers are skewed for
    long; 'replicas' where one expert has more tokens than a mean rank."""

    expert_replicas: int = 1
    """Number of experts of each layer that a rank may have beyond its share, with --elastic-expert-balance replicas or
    lazarus. Each takes the memory of its parameters and gradients; optimizer state does not grow. Raise it where the
    busiest rank stays far above the mean. Lazarus needs as many as a rank's share to have each expert on two ranks."""

    mean_time_between_losses: float = 3600.0
    """Expected seconds between two changes of membership. Layers move only if the gain exceeds the cost of moving
    within this time, or before the end of the run."""

    migration: Literal["background", "blocking"] = "background"
    """Time at which state moves between ranks. 'background': while steps go on. 'blocking': between two steps, while
    all ranks wait; use it for comparison."""

    spares: int = 0
    """Number of highest-numbered ranks kept as hot spares, a multiple of the tensor-parallel size. A spare replaces a
    lost rank at once."""

    verify_interval: int = 100
    """Steps between comparisons of the hashes of owners and copies, a part of the blocks each time. 0: never."""

    background_save: bool = True
    """Write checkpoints while training goes on. Without it each save ends before the next step begins."""

    strict_flags: bool = False
    """Refuse Megatron flags that this machine does not support. Without it they are replaced, and a table at start
    lists them."""

    check: bool = False
    """Print all flags that would be refused, replaced or without effect, and end without training: exit status 0 if the
    job would start, 1 if not. One process is enough; it does not wait for other nodes."""

    print_patches: bool = False
    """Print every function of Megatron that is replaced, then train."""

    event_log: str | None = None
    """Directory of the event log: one file a rank, one JSON line an event (generations, losses, plans, phases,
    certificates, tolerated losses, load of experts). Default: no event log."""

    dashboard: str | None = None
    """[ADDRESS:]PORT of a live page of the job, served by each launcher: topology, steps, losses, recoveries. The
    default address is loopback; another one needs --elastic-web-token-file. 0: any free port. Default: no page."""

    metrics: str | None = None
    """[ADDRESS:]PORT of an OpenMetrics endpoint of each launcher, at /metrics; address and port as for
    --elastic-dashboard, which serves the same metrics. Default: no endpoint."""

    web_token_file: str | None = None
    """File with the token, at least 16 characters, that requests to --elastic-dashboard and --elastic-metrics must
    carry. Required for addresses other than loopback."""

    webhook: str | None = None
    """http:// or https:// URL that gets a JSON message (POST) on each loss and at the end of the job. A message that
    cannot be delivered is given up after three attempts and delays nothing. Other users of the node can read the URL in
    the launcher's command line: use --elastic-webhook-file for one that holds a token. Default: no messages."""

    webhook_file: str | None = None
    """File with the URL of --elastic-webhook, readable by its owner alone. Only launchers read it.
    MEGATRON_ELASTIC_WEBHOOK may hold the URL itself. Use it where the URL holds a token."""

    notices: str | None = None
    """Source of notices that this node will be taken away, asked every 5 s: 'aws' (spot interruptions), 'gcp'
    (preemption, host maintenance), 'azure' (Scheduled Events), one of these with another address, e.g.
    'aws=http://HOST', or a URL that answers with a text when there is one. On a notice the node's ranks leave.
    Default: no notices."""

    health: str | None = None
    """Checks of this node's hardware, e.g. 'gpu,network,disk=/data:50,clock': 'gpu' (NVIDIA XID and ECC errors),
    'network' or 'network=ib0+ib1' (interfaces that are down), 'disk=FOLDER[:GIB]' (it can be written and has GIB free),
    'clock' (it is synchronized). A finding at the start ends the launcher. Later ones leave the node out: its lost
    ranks are not started again until the finding is gone, and its living ranks leave if the others can do without them.
    Default: no checks."""

    trace: bool = False
    """Add the times of each phase and computation to the event log; python -m megatron.elastic.observe.run_trace draws
    them."""

    inject: str | None = None
    """Faults to cause, for tests, e.g. 'kill:rank=2,step=5,point=after_reduce'. Needs --elastic-allow-inject."""

    allow_inject: bool = False
    """Allow --elastic-inject to kill ranks."""

    def __post_init__(self) -> None:
        faults = tuple(self._faults())
        if faults:
            raise ConfigError(*faults)

    def _faults(self) -> Iterator[str]:
        yield from self._number_faults()
        yield from self._replica_faults()
        yield from self._clock_faults()
        if self.trace and not self.event_log:
            yield "--elastic-trace needs --elastic-event-log DIR to write to"
        yield from self._web_faults()
        yield from self._url_faults()
        if self.inject and not self.allow_inject:
            yield "--elastic-inject needs --elastic-allow-inject (it kills workers on purpose)"
        yield from self._exact_faults()

    def _number_faults(self) -> Iterator[str]:
        if self.mirrors < 0:
            yield "--elastic-mirrors must be 0 or more"
        if self.scatter_width < 1:
            yield "--elastic-scatter-width must be 1 or more"
        if self.block_bytes is not None and (self.block_bytes < 1024 or self.block_bytes % 64):
            yield "--elastic-block-bytes must be a multiple of 64 and at least 1024"
        if self.bucket_elements < 1:
            yield "--elastic-bucket-elements (--ddp-bucket-size) must be 1 or more"
        if self.spares < 0:
            yield "--elastic-spares must be 0 or more"
        if self.max_losses_per_hour < 0:
            yield "--elastic-max-losses-per-hour must be a number of ranks, or 0 for no limit"
        if self.quarantine_after < 0:
            yield "--elastic-quarantine-after must be a number of losses, or 0 for never"
        if self.steps_before_migration < -1:
            yield "--elastic-migrate-after must be a number of steps, or -1 for never"
        if self.verify_interval < 0:
            yield "--elastic-verify-interval must be a number of steps, or 0 for never"
        # No comparison holds for nan, so each of these refuses it.
        if not 0 < self.mean_time_between_losses <= LONGEST_SECONDS:
            yield f"--elastic-mean-time-between-losses must be above 0 and at most {LONGEST_SECONDS:g} seconds"
        least, most = DETECTION_SECONDS
        if not least <= self.detection_timeout <= most:
            yield f"--elastic-detection-timeout must be between {least:g} and {most:g} seconds"

    def _replica_faults(self) -> Iterator[str]:
        policy = f"--elastic-expert-balance {self.expert_balance}"
        if self.expert_replicas < 1:
            yield ("--elastic-expert-replicas must be 1 or more; for none use --elastic-expert-balance homes (or off)")
        elif self.expert_replicas > 1 and self.expert_balance in ("off", "homes"):
            yield (
                f"--elastic-expert-replicas {self.expert_replicas} with {policy}, which makes no replicas: "
                "use --elastic-expert-balance replicas (or lazarus)"
            )

    def _clock_faults(self) -> Iterator[str]:
        if self.frequency not in ("off", "auto") and self.frequency.split(":")[0] not in ("nvml", "dcmi", "cpufreq"):
            yield "--elastic-frequency must be off, auto, or KIND:DEVICE (nvml, dcmi, cpufreq)"
        if self.frequency_boost and self.frequency == "off":
            yield "--elastic-frequency-boost raises clocks: give --elastic-frequency auto or KIND:DEVICE as well"

    def _web_faults(self) -> Iterator[str]:
        for flag, text in (("--elastic-dashboard", self.dashboard), ("--elastic-metrics", self.metrics)):
            if text is None:
                continue
            try:
                host, _ = web_address(text)
            except ValueError:
                yield f"{flag} takes PORT or ADDRESS:PORT, such as 8080 or 0.0.0.0:8080, got {text!r}"
                continue
            if host not in LOOPBACK and self.web_token_file is None:
                yield f"{flag} {text} is reached from other hosts: give --elastic-web-token-file, or a port alone"

    def _url_faults(self) -> Iterator[str]:
        if self.notices is not None:
            try:
                notice_source(self.notices)
            except ValueError:
                yield "--elastic-notices takes aws, gcp, azure, one of these with =URL, or an http:// or https:// URL"
        if self.health is not None:
            try:
                health_settings(self.health)
            except ValueError:
                yield "--elastic-health takes a list of gpu, network[=NAME+NAME], disk=FOLDER[:GIB] and clock"
        if self.webhook is not None and not is_web_url(self.webhook):
            yield "--elastic-webhook takes an http:// or https:// URL with a host"
        if self.webhook is not None and self.webhook_file is not None:
            yield "--elastic-webhook and --elastic-webhook-file exclude each other: give one"

    def _exact_faults(self) -> Iterator[str]:
        if self.exact and self.tensor == "live-on":
            yield (
                "--elastic-exact with --elastic-tensor live-on: sums over fewer ranks of a tensor-parallel group round "
                "differently; use --elastic-tensor park"
            )

    @property
    def replicas_of_a_rank(self) -> int:
        """Number of experts of a layer that a rank may have beyond its share; 0: the policy makes no replicas."""
        return self.expert_replicas if self.expert_balance in ("replicas", "lazarus") else 0

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
