"""The command line: torchrun's own parser, a few options more, and what the cluster says.

``parse(argv, environ)`` → :class:`JobSpec`, everything an agent needs, checked.
Bad input raises :class:`BadCommand` with one line that names the flag and the fix.
The script's ``--elastic-*`` flags are read and passed on, except ``--elastic-webhook``.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.run import determine_local_world_size, get_args_parser

from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.control.etcd import Etcd
from megatron.elastic.launch.cluster import RENDEZVOUS_OPTIONS, NodePlace, derive, without_brackets
from megatron.elastic.launch.domain import domain_of
from megatron.elastic.launch.secret import job_secret, web_token, webhook_url
from megatron.elastic.launch.settings import cell_size, elastic_settings, exit_signal, setup_seconds, without_webhook
from megatron.elastic.launch.workers.preload import modules_for
from megatron.elastic.launch.workers.zygote_messages import Kind

__all__ = ["BadCommand", "JobSpec", "parse"]


_DRAIN_SECONDS = 120
"""Saving a checkpoint takes longer than torchrun's 30 s; the sender of the signal has a limit of its own."""

_UNUSED: Mapping[str, object] = {
    "--max-restarts": 0,
    "--monitor-interval": 0.1,
    "--start-method": "spawn",
    "--event-log-handler": "null",
    "--duplicate-stdout-filters": [],
    "--duplicate-stderr-filters": [],
    "--logs-specs": None,
    "--numa-binding": None,
}
"""Options of torchrun that change nothing here, with their defaults."""


class BadCommand(ValueError):
    """One line: what is wrong with the command, which flag, what to do."""


@dataclass(frozen=True)
class LogFiles:
    """Files that workers' output goes to, in the words of ``DefaultLogsSpecs``."""

    folder: str | None
    """None: a temporary one, made when the workers are started."""
    redirects: Std | dict[int, Std]
    tee: Std | dict[int, Std]


@dataclass(frozen=True)
class JobSpec:
    """One agent's share of one job."""

    run_id: str
    node: int | None
    """None: to be agreed at the rendezvous."""
    nodes: int
    """As many as there may ever be."""
    least: int
    """Nodes of the launch; those that come later make the job wider."""
    workers: int
    master_addr: str
    master_port: int
    """0: any free port (one node only)."""
    local_addr: str
    local_addr_given: bool
    domain: str
    """Label of what fails together with this node."""
    rendezvous_timeout: float
    etcd: Etcd | None
    """The address of the store; None: the first agent serves it."""
    kind: Kind
    target: str
    arguments: tuple[str, ...]
    adapt: bool
    preload: tuple[str, ...]
    role: str
    logs: LogFiles | None
    """None: all is for the console."""
    shown: frozenset[int] | None
    """Local ranks whose output reaches the console; None: all."""
    line_prefix: str | None
    virtual_local_rank: bool
    max_restarts: int
    shutdown_timeout: float
    drain_timeout: float
    """Seconds an elastic job may take to save and end after a signal; as ``shutdown_timeout`` where that is given."""
    signals: tuple[str, ...]
    """Names of the signals that the launcher handles. An elastic job is drained by them."""
    elastic: bool
    """The script was given ``--elastic``."""
    settings: ElasticConfig
    cell: int
    """Ranks that compute together, as the script's arguments have it (tensor × context parallelism)."""
    setup_seconds: float
    """Time that the script's arguments leave for its set-up; 0: not given."""
    secret: str = field(repr=False)
    """Hex digits that every process of the job knows, and no other."""
    web_token: str = field(default="", repr=False)
    """Token that requests to the pages of this launcher must carry; empty: none."""
    webhook: str = field(default="", repr=False)
    """URL for messages about the job, which may hold a token; empty: none."""
    check: bool = False
    """The script was given ``--elastic-check``: one process of it tells what would be refused."""
    refused: str = ""
    """Why the launcher would refuse the job, to be told with the rest of such a check; empty when it would not."""


def build_parser() -> argparse.ArgumentParser:
    """torchrun's parser with our own group of options."""
    parser = get_args_parser()
    parser.prog = "python -m megatron.elastic.launch"
    parser.description = "Elastic launcher: torchrun's arguments, and workers whose loss does not end the others."
    own = parser.add_argument_group("elastic launcher")
    own.add_argument(
        "--adapt",
        action="store_true",
        help="Import megatron.elastic.adaptor before the script, so that a script without this import is elastic.",
    )
    own.add_argument(
        "--respawn",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Start lost workers again. Default: the script's --elastic-respawn.",
    )
    own.add_argument(
        "--preload",
        default="auto",
        help="Modules, comma-separated, that the parent of all workers imports once, so that workers start faster. "
        "'auto': those of torch, numpy and megatron that the script imports. 'none': use it if their import fails.",
    )
    with suppress(argparse.ArgumentError):  # torch has it from 2.12 on
        own.add_argument(
            "--shutdown-timeout",
            type=int,
            default=None,
            help="Seconds between the signal that ends workers and SIGKILL. Default: 30.",
        )
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> JobSpec:
    """The job described by ``argv``. Raises :class:`BadCommand`; ``--help`` exits like argparse."""
    args = build_parser().parse_args(list(argv))
    _warn_of_unused(args)
    try:
        place = derive(args, environ)
        return _job(args, place, _settings(args), environ)
    except (ConfigError, ValueError, AssertionError, RuntimeError, OSError) as error:
        raise BadCommand(str(error).split("\n", 1)[0]) from None


def _checks_only(args: argparse.Namespace) -> bool:
    return "--elastic-check" in args.training_script_args


def _settings(args: argparse.Namespace) -> ElasticConfig:
    """Raises :class:`ConfigError`; with ``--elastic-check`` it is the script that reports it, with all else."""
    try:
        return elastic_settings(args.training_script_args, respawn=args.respawn)
    except ConfigError:
        if _checks_only(args):
            return ElasticConfig()
        raise


def _warn_of_unused(args: argparse.Namespace) -> None:
    """torchrun options that tune what this launcher does in its own way: accepted, with one line."""
    changed = [flag for flag, default in _UNUSED.items() if getattr(args, flag[2:].replace("-", "_")) != default]
    keys = [item.partition("=")[0] for item in args.rdzv_conf.split(",")]
    changed += [f"--rdzv-conf {key}" for key in keys if key and key not in RENDEZVOUS_OPTIONS]
    if changed:
        print(
            f"[launch] options of torchrun without effect here, ignored: {', '.join(changed)}",
            file=sys.stderr,
            flush=True,
        )


def _job(args: argparse.Namespace, place: NodePlace, settings: ElasticConfig, environ: Mapping[str, str]) -> JobSpec:
    kind, target = _target(args)
    if args.shutdown_timeout is not None and args.shutdown_timeout < 0:
        raise ValueError(f"--shutdown-timeout takes seconds, 0 or more, got {args.shutdown_timeout}")
    run_id, workers, signals = _run_id(args, place), _workers(args.nproc_per_node), _signals(args.signals_to_handle)
    elastic = "--elastic" in args.training_script_args
    asked = _signals(exit_signal(args.training_script_args), "--exit-signal") if elastic else ()
    checks, refused, secret = _checks_only(args), "", ""
    token = web_token(settings.web_token_file) if settings.web_token_file else ""
    webhook = webhook_url(settings.webhook, settings.webhook_file, environ)
    # In a check a URL that is none stays there, and the script reports it with all else.
    arguments = args.training_script_args if settings.webhook is None else without_webhook(args.training_script_args)
    try:
        secret = job_secret(settings.secret_file, environ, alone=place.nodes == 1 and place.etcd is None)
    except ValueError as error:
        if not checks:
            raise
        refused = str(error)
    return JobSpec(
        run_id=run_id,
        node=place.node,
        nodes=place.nodes,
        least=place.least,
        workers=workers,
        master_addr=place.master_addr,
        master_port=place.master_port,
        local_addr=without_brackets(args.local_addr or "") or socket.gethostname(),
        local_addr_given=bool(args.local_addr),
        domain=domain_of(settings.domain, environ),
        rendezvous_timeout=place.timeout,
        etcd=place.etcd,
        kind=kind,
        target=target,
        arguments=tuple(arguments),
        adapt=args.adapt,
        preload=_preload(args.preload, kind, target, args.adapt, elastic),
        role=args.role,
        logs=None if checks else _logs(args),
        shown=_shown(args.local_ranks_filter),
        line_prefix=os.getenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        virtual_local_rank=args.virtual_local_rank,
        max_restarts=args.max_restarts,
        shutdown_timeout=float(args.shutdown_timeout if args.shutdown_timeout is not None else 30),
        drain_timeout=float(args.shutdown_timeout if args.shutdown_timeout is not None else _DRAIN_SECONDS),
        signals=tuple(dict.fromkeys((*signals, *asked))),
        elastic=elastic,
        settings=settings,
        cell=1 if checks else cell_size(args.training_script_args),
        setup_seconds=0.0 if checks else setup_seconds(args.training_script_args),
        secret=secret,
        web_token=token,
        webhook=webhook,
        check=checks,
        refused=refused,
    )


def _target(args: argparse.Namespace) -> tuple[Kind, str]:
    script: str = args.training_script
    if args.module and args.no_python:
        raise ValueError("--no-python and --module exclude each other: drop one")
    if args.module:
        return "module", script
    if args.no_python:
        return "program", script
    if not os.path.isfile(script):
        raise ValueError(f"training_script {script!r} is not a file")
    return "script", script


def _run_id(args: argparse.Namespace, place: NodePlace) -> str:
    if args.rdzv_id not in ("none", "") and not args.standalone:
        return str(args.rdzv_id)
    if place.run_id:
        return place.run_id
    if place.etcd is not None:
        raise ValueError("--rdzv-backend etcd needs --rdzv-id: etcd is shared by many jobs")
    # Several nodes must come to the same name without talking: the endpoint is what they share.
    return f"{place.master_addr}-{place.master_port}" if place.nodes > 1 else uuid.uuid4().hex[:12]


def _workers(nproc_per_node: str) -> int:
    try:
        count = int(determine_local_world_size(nproc_per_node))
    except ValueError as error:
        raise ValueError(f"--nproc-per-node {nproc_per_node}: {error}") from None
    if count < 1:
        raise ValueError(f"--nproc-per-node must be 1 or more, got {nproc_per_node}")
    return count


def _preload(wanted: str, kind: Kind, target: str, adapt: bool, elastic: bool) -> tuple[str, ...]:
    if wanted == "auto":
        return modules_for(kind, target, adapt, elastic)
    return () if wanted == "none" else tuple(name for name in wanted.split(",") if name)


def _logs(args: argparse.Namespace) -> LogFiles | None:
    files = LogFiles(args.log_dir, Std.from_str(args.redirects), Std.from_str(args.tee))
    if files.folder:
        try:
            os.makedirs(files.folder, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"--log-dir {files.folder} is a file or lies below one: name a folder") from None
        except OSError as error:
            raise ValueError(f"--log-dir {files.folder}: {error.strerror}: name a folder that can be made") from None
    elif args.redirects == args.tee == "0":
        return None  # torch would make a temporary folder, and leave it behind, for nothing
    return files


def _shown(local_ranks_filter: str) -> frozenset[int] | None:
    try:
        return frozenset(int(item) for item in local_ranks_filter.split(",")) if local_ranks_filter else None
    except ValueError:
        raise ValueError(f"--local-ranks-filter takes numbers like 0,1, got {local_ranks_filter!r}") from None


def _signals(names: str, flag: str = "--signals-to-handle") -> tuple[str, ...]:
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    unknown = [name for name in found if name not in signal.Signals.__members__]
    if unknown or {"SIGKILL", "SIGSTOP"} & set(found):
        raise ValueError(f"{flag} takes names of signals that can be handled, such as SIGUSR1; got {names!r}")
    return found
