"""The contenders of ``tools.bench.peers``: how each job is started, and what each is said to be.

Every contender trains the same GPT on the same samples with four ranks on this machine, data-parallel alone or under
another layout (:mod:`peers_programs.layouts`). Peers are started as their documentation says; *tuned* ones with the
lowest time-outs that hold on a busy machine. ``caveats`` names what makes a row unlike the others.
"""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tools.bench._jobs import QUIET, TORCHRUN, command
from tools.bench._peer_processes import Command
from tools.bench.peers_programs import common
from tools.bench.peers_programs.layouts import LAYOUTS, PLAIN, Layout

__all__ = ["CONTENDERS", "MEGATRON", "Contender", "Place", "free_ports"]

PROGRAMS = "tools.bench.peers_programs"
MEGATRON = QUIET + shlex.split(f"""
    --num-layers {common.LAYERS} --hidden-size {common.HIDDEN} --num-attention-heads {common.HEADS}
    --seq-length {common.SEQUENCE} --max-position-embeddings {common.SEQUENCE} --vocab-size {common.VOCABULARY - 1}
    --micro-batch-size 2 --global-batch-size {common.ROWS} --hidden-dropout 0 --attention-dropout 0
    --lr-decay-style constant --weight-decay {common.WEIGHT_DECAY} --clip-grad {common.CLIP}
""")
RESTARTS = "20"
ALONE = ("--standalone",)
"""torchrun's rendezvous for a launcher of one node; it makes a new store for each start of the ranks if asked."""


@dataclass(frozen=True)
class Place:
    """Where and how long one job runs."""

    python: Path
    """Interpreter of the contender's environment."""
    folder: Path
    data: Path
    ranks: int
    steps: int
    port: int
    """First of some free ones."""
    returns: bool = True
    """Whether a lost rank is started again."""
    layout: Layout = PLAIN


@dataclass(frozen=True)
class Contender:
    """One row: ``start`` gives its commands, ``environment`` is where it runs (empty: this one)."""

    title: str
    start: Callable[[Place], list[Command]]
    environment: str = ""
    baseline: str = "plain"
    """The run that its steady overhead is measured against: 'plain' DDP or 'megatron'."""
    coordinator: str = ""
    """What the fault 'coordinator' kills."""
    without_coordinator: str = ""
    """What happens to its job when the coordinator is killed, if the job prints nothing."""
    faults: tuple[str, ...] = ("kill", "stay", "rank0", "coordinator", "two", "stop")
    returns: bool = True
    """Whether it starts a lost rank again."""
    caveats: str = ""
    layouts: tuple[str, ...] = (PLAIN.name,)
    of_layouts: str = ""
    """What its documentation says about a lost rank of a replica with several ranks, and the place."""
    loses_replica: bool = False
    """True if the other ranks of that replica end or wait as well."""

    @property
    def own(self) -> bool:
        """Return whether it is this project's runtime."""
        return self.environment == ""


def free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive ports that are free now."""
    for first in range(21000 + (hash(socket.gethostname()) + sys.hash_info.width) % 1000, 32000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, opened in enumerate(sockets):
                opened.bind(("127.0.0.1", first + offset))
            return first
        except OSError:
            continue
        finally:
            for opened in sockets:
                opened.close()
    raise RuntimeError("no free ports between 21000 and 32000")


def ours(*flags: str) -> Callable[[Place], list[Command]]:
    """Return the start of this project's runtime with some flags."""

    def start(place: Place) -> list[Command]:
        elastic = ["--elastic", "--elastic-event-log", str(place.folder), *flags]
        if not place.returns:
            elastic.append("--no-elastic-respawn")
        job = command(place.ranks, *_megatron(place), *elastic)
        return [Command(tuple(job), coordinator=True)]

    return start


def megatron(place: Place) -> list[Command]:
    """Plain Megatron-LM under torchrun: the baseline of this project's rows."""
    return [Command(tuple(command(place.ranks, *_megatron(place), module=TORCHRUN)))]


def _megatron(place: Place) -> tuple[str, ...]:
    sizes = ("--tensor-model-parallel-size", str(place.layout.tensor))
    stages = ("--pipeline-model-parallel-size", str(place.layout.pipeline))
    return (*MEGATRON, "--train-iters", str(place.steps), *sizes, *stages)


def _program(place: Place, name: str, *flags: str) -> tuple[str, ...]:
    return (
        f"{PROGRAMS}.{name}",
        *("--data", str(place.data), "--events", str(place.folder), "--steps", str(place.steps)),
        *("--layout", place.layout.name),
        *flags,
    )


def plain(place: Place) -> list[Command]:
    """Plain DDP over gloo, without checkpoints: the baseline of the peers' rows."""
    return [Command((*_torchrun(place, "0"), "-m", *_program(place, "plain")))]


def _torchrun(place: Place, restarts: str) -> tuple[str, ...]:
    return (
        *(str(place.python), "-m", TORCHRUN, *ALONE, "--nproc-per-node", str(place.ranks)),
        *("--max-restarts", restarts),
    )


def torchrun(place: Place) -> list[Command]:
    """torchrun: all processes are started again, from a checkpoint of every step in memory."""
    program = _program(place, "plain", "--checkpoints", str(place.folder), "--group-timeout", "10")
    surroundings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [Command((*_torchrun(place, RESTARTS), "-m", *program), surroundings, coordinator=True)]


def torchft(tuned: bool) -> Callable[[Place], list[Command]]:
    """Return the start of torchft: a lighthouse, and a torchrun for each replica group of one model."""

    def start(place: Place) -> list[Command]:
        address = f"127.0.0.1:{place.port}"
        limits = (
            ("--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000") if tuned else ("--join_timeout_ms", "10000")
        )
        house = (str(place.python.parent / "torchft_lighthouse"), "--bind", address, "--min_replicas", "1")
        commands = [
            Command((*house, "--quorum_tick_ms", "100", *limits), coordinator=True, first_seconds=1.0, again=True)
        ]
        flags = ("--tuned", "--group-timeout", "1") if tuned else ()
        parts = place.layout.parts
        for replica in range(place.ranks // parts):
            surroundings = {
                "TORCHFT_LIGHTHOUSE": f"http://{address}",
                "REPLICA_GROUP_ID": str(replica),
                "NUM_REPLICA_GROUPS": str(place.ranks // parts),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a second start reads its manager's old address there
            }
            meeting = ("--nnodes", "1", "--master-port", str(place.port + 1 + replica)) if parts == 1 else ALONE
            launcher = (
                *(str(place.python), "-m", TORCHRUN, *meeting, "--nproc-per-node", str(parts)),
                *("--max-restarts", RESTARTS if place.returns else "0"),
            )
            commands.append(Command((*launcher, "-m", *_program(place, "torchft_ddp", *flags)), surroundings))
        return commands

    return start


def nvrx_inprocess(tuned: bool) -> Callable[[Place], list[Command]]:
    """Return the start of nvidia-resiliency-ext's in-process restart: bare ranks, since torchrun would end them all."""

    def start(place: Place) -> list[Command]:
        commands = []
        if tuned:
            stores = (str(place.python), "-m", f"{PROGRAMS}.stores", str(place.port + 1), str(place.port + 2))
            commands.append(Command(stores, coordinator=True, first_seconds=4.0))
        flags = (
            *("--checkpoints", str(place.folder)),
            *(("--tuned", "--group-timeout", "1") if tuned else ()),
        )
        for rank in range(place.ranks):
            surroundings = {
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(place.ranks)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place.port)},
            }
            words = (str(place.python), "-m", *_program(place, "nvrx_inprocess", *flags))
            commands.append(Command(words, surroundings, coordinator=not tuned and rank == 0))
        return commands

    return start


def ft_launcher(tuned: bool) -> Callable[[Place], list[Command]]:
    """Return the start of ft_launcher, which starts all ranks again, and finds hung ones by their heartbeats."""

    def start(place: Place) -> list[Command]:
        launcher = (
            *(str(place.python), "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"),
            *("--nnodes", "1", "--nproc-per-node", str(place.ranks), "--max-restarts", RESTARTS),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{place.port}"),
        )
        limits: tuple[str, ...] = ("--ft-ignore-missing-cfg",)
        if tuned:
            limits = (
                *("--monitor-interval", "0.05", "--workers-stop-timeout", "1", "--ft-workload-check-interval", "0.2"),
                *("--ft-initial-rank-heartbeat-timeout", "60", "--ft-rank-heartbeat-timeout", "2"),
            )
        program = _program(
            place,
            *("plain", "--heartbeats", "--checkpoints", str(place.folder), "--group-timeout", "10"),
            *(("--tuned",) if tuned else ()),
        )
        surroundings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return [Command((*launcher, *limits, "-m", *program), surroundings, coordinator=True)]

    return start


WHOLE_RESTARTS = "all processes are started again, so no step runs with fewer ranks"
SMALLER_CALLS = "a lost rank does not come back in this release; the others divide the global batch among them"
ALL = tuple(LAYOUTS)

TORCHFT = Contender(
    "torchft",
    torchft(tuned=False),
    "torchft",
    coordinator="the lighthouse, up again after 1 s",
    layouts=ALL,
    of_layouts="'fault tolerance across the replicated dimension with any mix of FSDP/TP/etc across the other "
    "dimensions' (README): a lost rank ends its replica group, which its own torchrun starts again",
    loses_replica=True,
)
IN_PROCESS = Contender(
    "nvidia-resiliency-ext, in-process",
    nvrx_inprocess(tuned=False),
    "nvrx",
    coordinator="rank 0, which serves the stores",
    faults=("stay", "rank0", "two", "stop"),
    returns=False,
    caveats=SMALLER_CALLS,
    layouts=ALL,
    of_layouts="'ensures that the active world size visible to the wrapped function is the largest multiple of M' "
    "(usage guide, ActiveWorldSizeDivisibleBy): the partner of a lost rank waits as a reserve",
    loses_replica=True,
)
FT_LAUNCHER = Contender(
    "nvidia-resiliency-ext, ft_launcher",
    ft_launcher(tuned=False),
    "nvrx",
    coordinator="the launcher",
    faults=("kill", "rank0", "coordinator", "two", "stop"),
    caveats=WHOLE_RESTARTS,
    layouts=ALL,
    of_layouts="'all workers are restarted if any worker fails (torchrun-style behavior)' (usage guide): any layout",
)


def under_the_rule_of(system: str, policy: str) -> Contender:
    """Return megatron-elastic with the rule of ``system`` for a lost rank's samples, and nothing else of it."""
    return Contender(
        f"megatron-elastic by the rule of {system}",
        ours("--elastic-policy", policy),
        baseline="megatron",
        faults=("stay",),
        layouts=ALL,
        of_layouts=f"the rule of {system} for the samples of a lost rank (flags, --elastic-policy {policy}); all else "
        "is megatron-elastic's",
    )


CONTENDERS: dict[str, Contender] = {
    "ours": Contender(
        "megatron-elastic",
        ours(),
        baseline="megatron",
        coordinator="the launcher of the job's one node, which also serves the store",
        without_coordinator="Its ranks see that their agent is gone and end themselves, so the job is over. With etcd "
        "and further nodes, the ranks of the other nodes go on",
        layouts=ALL,
        of_layouts="'they go on as a smaller group, with larger parts of its layers each' (flags, --elastic-tensor); "
        "'ranks that hold the same layers take the lost rank's samples over' (how it works)",
    ),
    "ours_exact": Contender(
        "megatron-elastic, exact",
        ours("--elastic-exact", "--calculate-per-token-loss"),  # the same loss: all micro-batches have as many tokens
        baseline="megatron",
        faults=("kill", "stay"),
    ),
    "ours_two_mirrors": Contender(
        "megatron-elastic, two mirrors", ours("--elastic-mirrors", "2"), baseline="megatron", faults=("two",)
    ),
    "ours_tuned": Contender(
        "megatron-elastic, tuned",
        ours("--elastic-detection-timeout", "0.1"),
        baseline="megatron",
        faults=("kill", "rank0", "stop"),
        caveats="a tenth of all time-outs (--elastic-detection-timeout 0.1)",
    ),
    "ours_mindspeed": under_the_rule_of("MindSpeed", "mindspeed"),
    "ours_recycle": under_the_rule_of("ReCycle", "recycle"),
    "ours_ntp": replace(
        under_the_rule_of("NTP", "ntp"), layouts=tuple(name for name in ALL if LAYOUTS[name].tensor > 1)
    ),
    "torchft": TORCHFT,
    "torchft_tuned": replace(TORCHFT, title="torchft, tuned", start=torchft(tuned=True)),
    "nvrx_inprocess": IN_PROCESS,
    "nvrx_inprocess_tuned": replace(
        IN_PROCESS,
        title="nvidia-resiliency-ext, in-process, tuned",
        start=nvrx_inprocess(tuned=True),
        coordinator="a process of its own that serves the stores",
        faults=("stay", "rank0", "coordinator", "two", "stop"),
    ),
    "ft_launcher": FT_LAUNCHER,
    "ft_launcher_tuned": replace(
        FT_LAUNCHER, title="nvidia-resiliency-ext, ft_launcher, tuned", start=ft_launcher(tuned=True)
    ),
    "torchrun": Contender(
        "torchrun, a checkpoint at every step",
        torchrun,
        "torch",
        coordinator="the launcher",
        faults=("kill", "rank0", "coordinator", "two", "stop"),
        caveats=WHOLE_RESTARTS,
        layouts=ALL,
        of_layouts="'if k<=n workers fail all workers are stopped and restarted' (docstring of "
        "torch.distributed.run): any layout",
    ),
}
"""By name. A rank that returns counts for 'kill'; under 'stay' it does not."""
