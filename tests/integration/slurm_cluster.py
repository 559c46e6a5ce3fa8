"""A Slurm cluster of two nodes on the loopback address, in a scratch folder: munge, one controller, two slurmds.

Nothing of the machine's own configuration is read or changed. ``slurmd`` and ``munged``
want to be started by root.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.integration.ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "scancel", "squeue")

CONFIG = """\
ClusterName=scratch
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why no cluster can be brought up here; empty when it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed: no {', '.join(missing)} (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "slurmd and munged want to be started by root"


@dataclass(frozen=True)
class Cluster:
    """A running cluster; ``environment`` makes Slurm's commands speak to it."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str) -> str:
        """Output of one of Slurm's commands."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout


@contextmanager
def cluster(folder: Path, environment: dict[str, str]) -> Iterator[Cluster]:
    """Two idle nodes, n0 and n1; everything is ended and reaped on the way out."""
    host = socket.gethostname().split(".")[0]
    for name in ("state", "munge"):
        (folder / name).mkdir(mode=0o700)
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, folder=folder, ports=free_ports(3)))
    (folder / "munge/key").write_bytes(os.urandom(1024))
    (folder / "munge/key").chmod(0o600)
    environment = {**environment, "SLURM_CONF": str(folder / "slurm.conf")}
    daemons: list[subprocess.Popen[bytes]] = []
    logs = (folder / "daemons.log").open("wb")

    def start(*command: str) -> None:
        daemons.append(subprocess.Popen(command, env=environment, stdout=logs, stderr=logs))

    try:
        munge = folder / "munge"
        # The scratch folder's parents are world-writable: --force lets munge have its socket there.
        start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={munge}/key",
            f"--socket={folder}/munge.sock",
            f"--pid-file={munge}/pid",
            f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
        )
        start("slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for node in ("n0", "n1"):
            start("slurmd", "-D", "-N", node, "-f", str(folder / "slurm.conf"))
        up = Cluster(folder, environment)
        _wait_idle(up)
        yield up
    finally:
        _end_all_jobs(environment)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(daemons):
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        logs.close()


def launchers(folder: Path) -> dict[int, int]:
    """Task number → process of its launcher, of the job that names ``folder`` in its command."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                agent = (entry / "comm").read_text() == "elastic-agent\n"
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            mine = any(str(folder).encode() in word for word in words)
            if mine and agent:
                task = next(v for v in variables if v.startswith(b"SLURM_PROCID="))
                found[int(task.split(b"=")[1])] = int(entry.name)
    return found


def _end_all_jobs(environment: Mapping[str, str]) -> None:
    """Kill the steps of a test that failed: they outlive the daemons and their srun."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        queue = subprocess.run(["squeue", "--noheader"], env=environment, capture_output=True, timeout=30, check=False)
        if queue.returncode or not queue.stdout.strip():
            return
        everything = ["scancel", "--full", "--signal=KILL", f"--user={getpass.getuser()}"]
        subprocess.run(everything, env=environment, capture_output=True, timeout=30, check=False)
        time.sleep(0.5)


def _wait_idle(up: Cluster) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%D %t"], env=up.environment, capture_output=True, text=True, check=False
        )
        if done.stdout.split() == ["2", "idle"]:
            return
        time.sleep(0.5)
    raise AssertionError((up.folder / "daemons.log").read_text()[-3000:])
