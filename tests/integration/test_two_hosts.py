"""A job over two hosts with addresses of their own, as two pods of an indexed Kubernetes job, outlives the loss of one.

The hosts are network namespaces joined by a virtual cable; each has a host name, a
hosts file in place of the headless service's names, and the environment the manifest
gives a pod. Everything between them goes over that cable, and one test pulls it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.integration.elastic_job import ROOT, JobResult, RunningJob, elastic_command, environment_of
from tests.integration.test_leaving import QUIET, RARELY, children, iteration_saved

SERVICE = "pretrain-gpt"
"""Name of the job and of its headless service in ``scripts/kubernetes/pretrain-gpt.yaml``."""


def why_not() -> str:
    """Why no namespaces can be made here; empty when they can."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "network namespaces want the program ip (Debian: iproute2) and root"
    name = f"probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.stderr.strip()


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made here")]


@dataclass(frozen=True)
class Pod:
    """One host: ``index`` is the pod's."""

    index: int
    namespace: str
    device: str
    hosts: Path

    def command(self, arguments: list[str]) -> list[str]:
        """``arguments`` run there, under the pod's host name."""
        inside = f"hostname {SERVICE}-{self.index} && mount --bind {self.hosts} /etc/hosts && exec "
        shell = ["sh", "-c", inside + shlex.join(arguments)]
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount", *shell]

    def environment(self) -> dict[str, str]:
        """The variables that the manifest and the kubelet put into it."""
        name = f"{SERVICE}-{self.index}"
        return environment_of(
            {
                "KUBERNETES_SERVICE_HOST": "10.96.0.1",
                "JOB_COMPLETION_INDEX": str(self.index),
                "HOSTNAME": name,
                "MEGATRON_ELASTIC_DOMAIN": name,
            }
        )


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def namespaces(folder: Path) -> Iterator[tuple[Pod, Pod]]:
    """Two hosts that nothing connects yet."""
    hosts = folder / "hosts"
    names = "".join(f"{address(i)} {SERVICE}-{i}.{SERVICE} {SERVICE}-{i}\n" for i in range(2))
    hosts.write_text("127.0.0.1 localhost\n" + names)
    tag = os.getpid() % 10000
    first, second = (Pod(i, f"elastic-{tag}-{i}", f"el{tag}v{i}", hosts) for i in range(2))
    both = first, second
    try:
        for pod in both:
            _ip("netns", "add", pod.namespace)
            _ip("-n", pod.namespace, "link", "set", "lo", "up")
        yield both
    finally:
        for pod in both:
            subprocess.run(["ip", "netns", "del", pod.namespace], capture_output=True, check=False)


def address(index: int) -> str:
    return f"10.77.0.{index + 1}"


@contextmanager
def pods(folder: Path) -> Iterator[tuple[Pod, Pod]]:
    """Two hosts and the cable between them."""
    with namespaces(folder) as both:
        _ip("link", "add", both[0].device, "type", "veth", "peer", "name", both[1].device)
        for pod in both:
            _ip("link", "set", pod.device, "netns", pod.namespace)
            _ip("-n", pod.namespace, "addr", "add", f"{address(pod.index)}/24", "dev", pod.device)
            _ip("-n", pod.namespace, "link", "set", pod.device, "up")
        yield both


def arguments(folder: Path, *options: str) -> list[str]:
    """The pod's command with more options: the same in both, the index comes from the environment."""
    plain = elastic_command(folder / "events", 1, 1, 1, 100_000, *QUIET, *RARELY, "--save", str(folder / "saved"))
    at = plain.index("--nproc-per-node")
    where = ["--nnodes", "2", "--master-addr", f"{SERVICE}-0.{SERVICE}", "--master-port", "6000"]
    return [*plain[:at], *where, *options, *plain[at:]]


def in_the_manifest(text: str) -> bool:
    return text in (ROOT / "scripts/kubernetes/pretrain-gpt.yaml").read_text()


@contextmanager
def running(folder: Path, both: tuple[Pod, Pod], *of_first: str) -> Iterator[tuple[RunningJob, RunningJob]]:
    """Launchers of both pods; ``of_first``: options that the first alone has."""
    assert in_the_manifest(f"{SERVICE}-0.{SERVICE}") and in_the_manifest("job-completion-index")
    first, second = (
        RunningJob(folder / "events", pod.command(arguments(folder, *more)), environ=pod.environment(), named=False)
        for pod, more in zip(both, (of_first, ()), strict=True)
    )
    with first, second:
        yield first, second


def check_left(folder: Path, result: JobResult) -> None:
    assert result.code == 3, result.output[-4000:]
    assert iteration_saved(folder / "saved") == max(result.committed)
    assert sorted(result.committed) == list(range(1, max(result.committed) + 1)), "every step is committed"
    hosts = {record.fields["host"] for record in result.of("loss")}
    assert hosts == {f"{SERVICE}-1/1"}, "the lost host is named"


def test_all_processes_of_one_pod_are_killed(tmp_path: Path) -> None:
    with pods(tmp_path) as both, running(tmp_path, both) as (first, second):
        second.wait_for(r"iteration +3/")  # the last rank prints
        parents = children(second.launcher.pid)
        workers = [pid for parent in parents for pid in children(parent)]
        for pid in (second.launcher.pid, *parents, *workers):
            os.kill(pid, signal.SIGKILL)
        gone = first.wait_for(r"recovered at generation").end()
        at = int(first.wait_for(r"iteration +(\d+)/", gone).group(1))
        first.wait_for(rf"iteration +{at + 3}/", gone)
        first.launcher.send_signal(signal.SIGTERM)
        check_left(tmp_path, first.finish())


def test_the_cable_is_pulled(tmp_path: Path) -> None:
    """Each side thinks the other gone; only the one with the store goes on, and the other ends its ranks by itself."""
    with pods(tmp_path) as both, running(tmp_path, both) as (first, second):
        second.wait_for(r"iteration +3/")  # the last rank prints
        _ip("-n", both[1].namespace, "link", "set", both[1].device, "down")
        gone = first.wait_for(r"recovered at generation").end()
        at = int(first.wait_for(r"iteration +(\d+)/", gone).group(1))
        first.wait_for(rf"iteration +{at + 3}/", gone)
        second.wait_for(r"lease|store")
        first.launcher.send_signal(signal.SIGTERM)
        check_left(tmp_path, first.finish())
        assert re.search(r"node|unreachable", first.output)


def own_name_is_loopback(folder: Path, pod: Pod) -> Pod:
    """The same host with a hosts file as Debian writes it: the host's own name is 127.0.1.1."""
    hosts = folder / "own_hosts"
    hosts.write_text(pod.hosts.read_text().replace(f"{address(pod.index)} ", "127.0.1.1 "))
    return replace(pod, hosts=hosts)


def test_a_job_starts_where_the_first_hosts_own_name_is_a_loopback_address(tmp_path: Path) -> None:
    with pods(tmp_path) as (first_pod, second_pod):
        both = own_name_is_loopback(tmp_path, first_pod), second_pod
        with running(tmp_path, both) as (first, second):
            second.wait_for(r"iteration +3/")
            first.launcher.send_signal(signal.SIGTERM)
            assert (first.finish().code, second.finish().code) == (3, 3)


def test_an_address_that_the_other_host_cannot_reach_is_refused_by_both(tmp_path: Path) -> None:
    with pods(tmp_path) as both, running(tmp_path, both, "--local-addr", "127.0.1.1") as ran:
        for result in (job.finish() for job in ran):
            assert result.code == 1, result.output
            assert "error: node 0 announces the loopback address 127.0.1.1" in result.output
            assert "--local-addr" in result.output and "Traceback" not in result.output
