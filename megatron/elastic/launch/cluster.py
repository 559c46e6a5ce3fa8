"""Number of this node, number of nodes, and the address of the first one: from flags, Slurm or Kubernetes.

Flags win. Under ``srun`` (one launcher a task) and in an indexed Kubernetes job
or a stateful set, what is not given comes from the environment there.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.run import parse_min_max_nnodes

from megatron.elastic.config import LONGEST_SECONDS
from megatron.elastic.control.etcd import Etcd

__all__ = ["RENDEZVOUS_OPTIONS", "NodePlace", "derive", "first_host", "without_brackets"]

RENDEZVOUS_OPTIONS = ("join_timeout", "timeout", "protocol", "ca_cert", "ssl_cert", "ssl_cert_key")
"""The keys of ``--rdzv-conf`` that are read."""
_DEFAULT_PORT = 29500
_SRUN = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID")
"""Variables of a task of ``srun``: launchers, number of this one, job, step."""


@dataclass(frozen=True)
class NodePlace:
    """The place of this agent among the nodes."""

    node: int | None
    """None: whichever place is free (rendezvous backend c10d, as torchrun has it)."""
    nodes: int
    """As many as there may be (``--nnodes MIN:MAX``)."""
    least: int
    """As many as the job starts with."""
    master_addr: str
    master_port: int
    timeout: float
    """Seconds to wait for the other nodes."""
    run_id: str | None = None
    etcd: Etcd | None = None
    """The address of the store, unless the first agent serves it."""


def derive(args: argparse.Namespace, environ: Mapping[str, str]) -> NodePlace:
    """The placement of this agent. Raises ValueError with one line naming the flag and the fix."""
    options = _rendezvous_options(args)
    timeout = _rendezvous_timeout(options)
    if args.standalone:
        return NodePlace(0, 1, 1, "127.0.0.1", 0, timeout)
    least, nodes = _node_counts(args.nnodes)
    if args.rdzv_backend not in ("static", "c10d", "etcd"):
        raise ValueError(f"--rdzv-backend {args.rdzv_backend} is not supported: use static, c10d or etcd")
    etcd = Etcd.parse(args.rdzv_endpoint, options, environ) if args.rdzv_backend == "etcd" else None
    node: int | None = int(args.node_rank)
    host, port = _endpoint(args)
    if etcd is not None:  # its endpoint tells the way to the others, not the place of the first agent
        host, port = etcd.endpoints[0][0], int(args.master_port) if args.master_port is not None else None
    run_id = None
    if nodes == 1 and (host is None or etcd is not None) and _in_srun(environ):
        nodes, node, job, step = (_number(environ, name) for name in _SRUN)
        least = nodes
        host = host or first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
        run_id = f"slurm-{job}-{step}"
        if port is None:
            port = 20000 + (job * 31 + step) % 20000
    elif nodes > 1 and node == 0 and "KUBERNETES_SERVICE_HOST" in environ:
        node = _kubernetes_index(environ)
    elif nodes > 1 and node == 0 and args.rdzv_backend == "c10d":
        node = None
    if node is not None and not 0 <= node < nodes:
        raise ValueError(f"--node-rank {node} is outside --nnodes {nodes}: it counts from 0")
    if nodes == 1 and host is None and port is None:
        port = 0
    port = port if port is not None else _DEFAULT_PORT
    if not 0 <= port < 1 << 16 or (port == 0 and nodes > 1):
        at_least = 0 if nodes == 1 else 1
        raise ValueError(f"--master-port (--rdzv-endpoint) takes a port from {at_least} to 65535, got {port}")
    return NodePlace(node, nodes, least, host or without_brackets(args.master_addr), port, timeout, run_id, etcd)


def _node_counts(text: str) -> tuple[int, int]:
    """Nodes of the launch, and the most that there may be."""
    try:
        least, nodes = parse_min_max_nnodes(text)
    except (ValueError, RuntimeError):
        least, nodes = 0, 0
    if not 1 <= least <= nodes:
        raise ValueError(
            f"--nnodes takes a number of nodes, or MIN:MAX with MIN at least 1 and MAX not less, got {text!r}"
        )
    return least, nodes


def without_brackets(host: str) -> str:
    """The IPv6 address in ``[ADDRESS]``; any other host as it is."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list: ``"gpu[003-007,12],cpu1"`` → ``"gpu003"``."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodelist)
    if match is None:
        raise ValueError(f"cannot read the Slurm node list {nodelist!r}: give --master-addr")
    return match.group(1) + (match.group(2) or "") + (match.group(3) or "")


def _in_srun(environ: Mapping[str, str]) -> bool:
    return all(environ.get(name) for name in _SRUN) and _number(environ, _SRUN[0]) > 1


def _number(environ: Mapping[str, str], name: str) -> int:
    """Raises ValueError with one line that names the variable."""
    try:
        return int(environ[name])
    except ValueError:
        flags = "--nnodes, --node-rank and --master-addr"
        raise ValueError(
            f"{name}={environ[name]!r} of the environment is no number: unset it and give {flags}"
        ) from None


def _kubernetes_index(environ: Mapping[str, str]) -> int:
    """Index of a pod in an indexed job, or at the end of a stateful pod's host name; 0 where there is none."""
    if environ.get("JOB_COMPLETION_INDEX"):
        return _number(environ, "JOB_COMPLETION_INDEX")
    ordinal = re.search(r"-(\d+)$", environ.get("HOSTNAME", ""))
    return int(ordinal.group(1)) if ordinal else 0


def _endpoint(args: argparse.Namespace) -> tuple[str | None, int | None]:
    """Host and port of the first agent as far as flags say."""
    endpoint = args.rdzv_endpoint
    if not endpoint:
        host = without_brackets(args.master_addr) if args.master_addr != "127.0.0.1" else None
        return host, int(args.master_port) if args.master_port is not None else None
    host, _, port = endpoint.rpartition(":") if re.search(r":\d+$", endpoint) else (endpoint, "", "")
    return without_brackets(host), int(port) if port else None


def _rendezvous_options(args: argparse.Namespace) -> dict[str, str]:
    """``--rdzv-conf``: KEY=VALUE[,KEY=VALUE…]."""
    items = [item.partition("=") for item in args.rdzv_conf.split(",") if item]
    if not all(key and value for key, _, value in items):
        raise ValueError(f"--rdzv-conf takes KEY=VALUE[,KEY=VALUE…], got {args.rdzv_conf!r}")
    return {key: value for key, _, value in items}


def _rendezvous_timeout(options: Mapping[str, str]) -> float:
    """Seconds to wait for the other nodes: ``join_timeout`` of ``--rdzv-conf``, else its ``timeout``, else 600."""
    name = next((name for name in ("join_timeout", "timeout") if options.get(name)), None)
    if name is None:
        return 600.0
    try:
        seconds = float(options[name])
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_SECONDS:
        raise ValueError(
            f"--rdzv-conf {name} takes seconds above 0 and at most {LONGEST_SECONDS:g}, got {options[name]!r}"
        )
    return seconds
