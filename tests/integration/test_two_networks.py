"""The ranks' network of one host fails without a sign, while all agents reach the store over another network.

Three hosts are network namespaces with a cable each to the switch of either network. The
test takes the data network's cable of one host out of its switch.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.integration.elastic_job import RunningJob, elastic_command
from tests.integration.test_leaving import QUIET, RARELY
from tests.integration.test_two_hosts import SERVICE, Pod, _ip, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made here")]

STORE, DATA = "10.78.0", "10.77.0"
"""Networks of 24 bits."""
HOSTS = range(3)


class Switches:
    """A namespace with the switch of either network, and the ends of all cables."""

    def __init__(self) -> None:
        self._tag = os.getpid() % 10000
        self.namespace = f"elastic-{self._tag}-switches"

    def end(self, network: str, host: int) -> str:
        return f"s{self._tag}{'d' if network == DATA else 'm'}{host}"

    def connect(self, pods: list[Pod]) -> None:
        for network, switch in ((STORE, "store"), (DATA, "data")):
            _ip("-n", self.namespace, "link", "add", switch, "type", "bridge")
            _ip("-n", self.namespace, "link", "set", switch, "up")
            for pod in pods:
                end, device = self.end(network, pod.index), f"{switch}0"
                _ip("link", "add", device, "netns", pod.namespace, "type", "veth")
                _ip("-n", pod.namespace, "addr", "add", f"{network}.{pod.index + 1}/24", "dev", device)
                _ip("-n", pod.namespace, "link", "set", "veth0", "name", end)
                _ip("-n", pod.namespace, "link", "set", end, "netns", self.namespace)
                _ip("-n", self.namespace, "link", "set", end, "master", switch)
                _ip("-n", self.namespace, "link", "set", end, "up")
                _ip("-n", pod.namespace, "link", "set", device, "up")

    def cut(self, network: str, host: int) -> None:
        """The host itself sees no fault: its own end stays up."""
        _ip("-n", self.namespace, "link", "set", self.end(network, host), "nomaster")


@contextmanager
def connected(folder: Path) -> Iterator[tuple[Switches, list[Pod]]]:
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{DATA}.{i + 1} {SERVICE}-{i}\n" for i in HOSTS))
    switches = Switches()
    pods = [Pod(i, f"{switches.namespace}-{i}", "", hosts) for i in HOSTS]
    namespaces = [switches.namespace, *(pod.namespace for pod in pods)]
    try:
        for name in namespaces:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        switches.connect(pods)
        yield switches, pods
    finally:
        for name in namespaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def arguments(folder: Path, host: int) -> list[str]:
    timeout = ("--elastic-detection-timeout", "0.5")
    quiet = (*QUIET, *RARELY, "--save", str(folder / "saved"), *timeout)
    plain = elastic_command(folder / "events", 1, 1, 1, 100_000, *quiet)
    plain[plain.index("--global-batch-size") + 1] = "12"
    at = plain.index("--nproc-per-node")
    where = ["--nnodes", "3", "--master-addr", f"{STORE}.1", "--master-port", "6000"]
    return [*plain[:at], *where, "--local-addr", f"{DATA}.{host + 1}", *plain[at:]]


@pytest.mark.parametrize("lost", [0, 1])
def test_the_others_go_on_without_the_host_that_is_cut_off(tmp_path: Path, lost: int) -> None:
    """Also without the one that serves the store. Neither is the highest, which would go if all were alike."""
    with connected(tmp_path) as (switches, pods), ExitStack() as stack:
        jobs = [
            stack.enter_context(
                RunningJob(
                    tmp_path / "events",
                    pod.command(arguments(tmp_path, pod.index)),
                    environ=pod.environment(),
                    named=False,
                )
            )
            for pod in pods
        ]
        jobs[-1].wait_for(r"iteration +6/")  # the last rank prints
        switches.cut(DATA, lost)
        jobs[lost].wait_for(rf"ranks \[{lost}\] are not started again: no data passes between nodes .*ctl admit")
        seen = len(jobs[-1].output)
        at = int(jobs[-1].wait_for(r"iteration +(\d+)/", seen).group(1))
        jobs[-1].wait_for(rf"iteration +{at + 3}/", seen)
        jobs[0].launcher.send_signal(15)
        result = jobs[0].finish()
        assert result.code == 3, result.output[-4000:]
        losses = {record.fields["host"] for record in result.of("loss")}
        assert losses == {f"{DATA}.{lost + 1}/{lost}"}, losses
