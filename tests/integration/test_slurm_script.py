"""``sbatch scripts/pretrain_gpt.slurm``: drained on notice, queued again, resumed; with etcd any node may fail.

The batch script and Slurm are real. Slurm runs the script in the folder it was submitted from, where
``scripts/pretrain_gpt_cuda.sh``, which it starts on each node, is the same launcher with a small model on the CPU.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.elastic.observe.events import read_events
from tests.integration.elastic_job import ROOT, elastic_command, environment_of
from tests.integration.etcd_server import etcd_server
from tests.integration.ports import free_port
from tests.integration.slurm_cluster import Cluster, cluster, launchers, why_not
from tests.integration.test_leaving import ANY_SCHEDULE, QUIET, RARELY, iteration_saved

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm is here")]

SECONDS = 300.0
FOR_EVER = 100_000
ON_EACH_NODE = """\
source {root}/scripts/nodes.sh
export MASTER_ADDR=localhost  # both nodes are this machine, whose name is not theirs
elastic_nodes "$NUM_NODES" "$NODE_RANK"
exec {before} "${{NODE_ARGS[@]}}" {after} --train-iters "$(cat iterations)"
"""


class Batch:
    """The job of the script under way. Killed with its cluster when the block ends."""

    def __init__(self, up: Cluster, folder: Path) -> None:
        self._up, self.folder = up, folder
        scripts = folder / "scripts"
        scripts.mkdir(parents=True)
        self.saved = folder / "checkpoints" / "saved"
        saving = (*RARELY, *ANY_SCHEDULE, "--save", str(self.saved), "--load", str(self.saved))
        plain = elastic_command(folder / "events", 1, 1, 1, FOR_EVER, *QUIET, *saving)
        at = plain.index("--nproc-per-node")
        words = {"root": shlex.quote(str(ROOT)), "before": shlex.join(plain[:at]), "after": shlex.join(plain[at:])}
        (scripts / "pretrain_gpt_cuda.sh").write_text(ON_EACH_NODE.format(**words))
        self.iterations(FOR_EVER)
        script = str(ROOT / "scripts/pretrain_gpt.slurm")
        submit = ["sbatch", "--parsable", f"--chdir={folder}", "--nodes=2", "--gpus-per-node=0", script]
        self.number = up.run(*submit, str(folder / "checkpoints"), "board", "tokenizer", "data").strip()

    def iterations(self, number: int) -> None:
        """Train up to ``number`` when the job is started next."""
        (self.folder / "iterations").write_text(str(number))

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"*-{self.number}.log"))

    def wait_for(self, pattern: str, after: int = 0) -> re.Match[str]:
        """The first match from ``after`` on in the script's output."""
        return self._until(lambda: re.compile(pattern).search(self.output, after), pattern)

    def state(self) -> str:
        """Slurm's state of the job."""
        shown = self._up.run("scontrol", "show", "job", self.number)
        (state,) = re.findall(r"JobState=(\w+)", shown)
        return str(state)

    def wait_until(self, state: str) -> None:
        """Wait until Slurm calls the job so."""
        self._until(lambda: re.match(state, self.state()), state)

    def _until(self, found: Callable[[], re.Match[str] | None], what: str) -> re.Match[str]:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if match := found():
                return match
            time.sleep(0.3)
        raise AssertionError(f"{what!r} not seen, the job is {self.state()}\n{self.output[-6000:]}")


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "slurm").mkdir()
    with cluster(tmp_path / "slurm", environment_of()) as running:
        yield running


@pytest.mark.timeout(900)
def test_a_notice_drains_the_job_and_it_goes_on_when_it_is_queued_again(tmp_path: Path, up: Cluster) -> None:
    up.environment["MASTER_PORT"] = str(free_port())
    batch = Batch(up, tmp_path / "submit")
    batch.wait_for(r"iteration +3/")
    up.run("scancel", "--signal=TERM", batch.number)  # as --signal=TERM@180 does before the end of the time
    drained = batch.wait_for(r"drained at iteration (\d+)")
    at = int(drained.group(1))
    batch.iterations(at + 4)
    assert iteration_saved(batch.saved) == at
    again = batch.wait_for(rf"loaded checkpoint.* at iteration {at}\b", drained.end())
    batch.wait_for(rf"iteration +{at + 4}/", again.end())
    batch.wait_until("COMPLETED")
    first = int(re.findall(r"iteration +(\d+)/", batch.output[again.end() :])[0])
    assert first == at + 1, "no step is lost or trained twice"
    assert iteration_saved(batch.saved) == at + 4


@pytest.mark.timeout(900)
def test_with_etcd_the_job_goes_on_without_its_first_node(tmp_path: Path, up: Cluster) -> None:
    with etcd_server(tmp_path / "etcd") as store:
        up.environment["ETCD_ENDPOINT"] = store.endpoint
        batch = Batch(up, tmp_path / "submit")
        batch.wait_for(r"iteration +3/")
        os.kill(launchers(batch.folder)[0], signal.SIGKILL)
        lost = batch.wait_for(r"recovered at generation").end()
        step = int(batch.wait_for(r"iteration +(\d+)/", lost).group(1))
        batch.wait_for(rf"iteration +{step + 3}/", lost)
        assert batch.state() == "RUNNING"
        up.run("scancel", "--signal=TERM", batch.number)
        at = int(batch.wait_for(r"drained at iteration (\d+)", lost).group(1))
        assert iteration_saved(batch.saved) == at
        committed = {record.fields["step"] for record in read_events(batch.folder / "events") if record.kind == "step"}
        assert committed == set(range(1, at + 1)), "every step is committed"
        batch.wait_until("PENDING")  # drained: queued again, although the first node's launcher was killed
