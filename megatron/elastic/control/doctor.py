"""``ctl doctor``: why a job does not start, one line each for what is there and what is missing.

It looks at the machine, at the launchers of this user that have not met the others yet, at the stores that these
expect, and at jobs that have met and do not step. It changes nothing, and needs neither torch nor an answer of a
worker.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron.elastic.control import env
from megatron.elastic.control.answers import JobStatus
from megatron.elastic.control.starting import StartStatus
from megatron.elastic.control.status_text import duration
from megatron.elastic.observe.summary import ranks_text
from megatron.elastic.platform.findings import Finding
from megatron.elastic.platform.installation import check_installation, check_open_files

__all__ = ["diagnose", "reach", "start_findings", "status_findings"]

_CONNECT_SECONDS = 3.0


def diagnose(
    starts: Sequence[StartStatus],
    jobs: Sequence[JobStatus | str],
    stores: Sequence[tuple[str, int]],
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Finding]:
    """All findings. ``jobs``: those with a console, or why one did not answer; ``stores``: asked for by the user."""
    yield from check_installation()
    yield check_open_files(max((start.files for start in starts), default=0))
    yield from _secret(starts, environ)
    # A launcher that serves its store says so itself, and may not have got to it.
    wanted = {place for start in starts if not start.serves for place in start.store} | set(stores)
    for host, port in sorted(wanted):
        yield reach(host, port)
    for start in starts:
        yield from start_findings(start)
    for job in jobs:
        if isinstance(job, str):
            yield Finding("missing", "job", job)
        else:
            yield from status_findings(job)
    if not starts and not jobs:
        yield Finding("note", "launcher", "none of yours runs on this machine")


def reach(host: str, port: int, connect: Callable[..., socket.socket] = socket.create_connection) -> Finding:
    """Try to connect to ``host:port``; nothing is sent."""
    where = f"{host}:{port}"
    try:
        connect((host, port), _CONNECT_SECONDS).close()
    except socket.gaierror:
        return Finding("missing", "store", f"{where}: no such host: check --master-addr or --rdzv-endpoint, or the DNS")
    except ConnectionRefusedError:
        fix = "start the first agent (node 0) or etcd there, or correct --master-port or --rdzv-endpoint"
        return Finding("missing", "store", f"{where}: nothing listens there: {fix}")
    except OSError as error:
        why = str(error) if isinstance(error, TimeoutError) else error.strerror or str(error)
        fix = "check the network and firewalls between the nodes"
        return Finding("missing", "store", f"{where}: no connection ({why}): {fix}")
    return Finding("ok", "store", f"{where} accepts connections")


def start_findings(start: StartStatus) -> Iterator[Finding]:
    """The findings about one launcher that starts."""
    node = f"node {start.node}" if start.node >= 0 else "no node rank yet"
    if start.serves:
        yield Finding("ok", "store", "served by this launcher at " + ", ".join(f"{h}:{p}" for h, p in start.store))
    what = f"job {start.run_id}, pid {start.pid}, {node} of {start.least}, {start.workers} workers: {start.doing}"
    yield Finding("missing", "launcher", f"{what}, for {duration(start.seconds)}")


def status_findings(status: JobStatus) -> Iterator[Finding]:
    """The findings about one job whose agents have met."""
    job = f"{status.run_id} (up {duration(status.up_s)})"
    for number, node in status.nodes.items():
        if not node.alive and any(each.incarnation >= 0 for each in status.ranks.values()):
            yield Finding("missing", "node", f"{number} ({node.host}) of job {job} is not here: start its launcher")
    if status.state != "starting":
        step = "" if status.progress is None else f", step {status.progress.step}"
        yield Finding("ok", "job", f"{job}: {status.state}{step}")
        return
    waits: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, worker in status.workers_here.items():
        waits.setdefault((worker.phase, worker.waiting_for), []).append(rank)
    for (phase, missed), ranks in waits.items():
        waiting = f", waiting for ranks {ranks_text(missed)}" if missed else ""
        idle = max(status.workers_here[rank].idle_s for rank in ranks)
        yield Finding(
            "missing",
            "first step",
            f"job {job}: ranks {ranks_text(ranks)} here: {phase}{waiting}, without progress for {duration(idle)}",
        )
    if not waits:
        yield Finding("missing", "first step", f"job {job}: no worker runs here yet")
    for loss in status.history.last_losses[-3:]:
        yield Finding("missing", "loss", f"rank {loss.rank} on {loss.host} before the first step: {loss.cause}")


def _secret(starts: Sequence[StartStatus], environ: Mapping[str, str]) -> Iterator[Finding]:
    for start in starts:
        yield Finding(
            "ok", "secret", f"job {start.run_id}: fingerprint {start.secret}; it must be the same on every node"
        )
    if not starts:
        source = next((name for name in (env.SECRET_FILE, env.SECRET) if environ.get(name)), None)
        text = f"given by {source}" if source else "none in this shell: a job of several nodes needs one"
        yield Finding("note", "secret", f"{text} (--elastic-secret-file, {env.SECRET})")
