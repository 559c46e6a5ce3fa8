"""The Kubernetes manifests have fields that exist, and the TrainJob's command runs as its pods would run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.elastic_job import ROOT, RunningJob, environment_of
from tests.integration.ports import free_port

pytestmark = pytest.mark.slow
MANIFESTS = ROOT / "scripts" / "kubernetes"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The schemas in a folder of their own: the environment that trains stays as it is."""
    folder = tmp_path_factory.mktemp("schemas")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, "-r", str(ROOT / "requirements" / "manifests.txt")], check=True, timeout=300)
    return folder


def checked(packages: Path, *files: Path) -> list[dict[str, Any]]:
    command = [sys.executable, str(ROOT / "tests" / "integration" / "schemas.py"), *map(str, files)]
    environ = environment_of({"PYTHONPATH": str(packages)})
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_schemas_of_their_projects_accept_every_manifest(packages: Path) -> None:
    """All but the kubelet's own configuration, whose type no package has."""
    found = checked(packages, *sorted(set(MANIFESTS.glob("*.yaml")) - {MANIFESTS / "kubelet.yaml"}))
    assert [each for each in found if each["refused"]] == []
    kinds = ["Service", "PodDisruptionBudget", "StatefulSet", "JobSet", "Service", "Job", "TrainingRuntime", "TrainJob"]
    assert [each["kind"] for each in found] == kinds


@pytest.mark.parametrize(
    ("name", "line", "other", "refused"),
    [
        ("jobset.yaml", "maxRestarts: 0", "maxRestart: 0", ".maxRestart: no such field"),
        ("trainjob.yaml", "torch: {}", "torch: {numProcPerNode: auto}", ".numProcPerNode: no such field"),
        ("trainjob.yaml", "numNodes: 2", "numNodes: two", "numNodes"),
        ("pretrain-gpt.yaml", "backoffLimitPerIndex", "backoffLimitPerindex", "backoffLimitPerindex"),
        ("etcd.yaml", "serviceName: etcd", "serviceName: 7", "7 is not of type"),
    ],
)
def test_a_field_that_does_not_exist_or_is_of_another_type_is_refused(
    packages: Path, tmp_path: Path, name: str, line: str, other: str, refused: str
) -> None:
    text = (MANIFESTS / name).read_text(encoding="utf-8")
    assert line in text
    (tmp_path / name).write_text(text.replace(line, other), encoding="utf-8")
    (faults,) = [each["refused"] for each in checked(packages, tmp_path / name) if each["refused"]]
    assert refused in str(faults), faults


SMALL = {
    "num-layers": 4,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "global-batch-size": 8,
    "train-iters": 3,
    "eval-iters": 1,
    "tokenizer-type": "NullTokenizer",
}
"""Sizes of a processor, in place of the manifest's."""
NOT_HERE = ("--data-path", "--tokenizer-model")


def words(trainer: dict[str, Any], data: Path) -> list[str]:
    """The TrainJob's command, with a smaller model, without its corpus, and with its volume at ``data``."""
    flags = [flag for flag in trainer["args"] if not flag.startswith(NOT_HERE)]
    smaller = []
    for flag in flags:
        name = flag.removeprefix("--").partition("=")[0]
        smaller.append(f"--{name}={SMALL[name]}" if name in SMALL else flag.replace("/data/", f"{data}/"))
    assert set(SMALL) <= {flag.removeprefix("--").partition("=")[0] for flag in flags}
    python, *command = trainer["command"]
    assert python == "python"
    mock = ["--mock-data", "--vocab-size=255", "--log-interval=1"]
    return [sys.executable, *command, *smaller, *mock]


def test_the_trainjobs_command_trains_as_two_pods_with_trainers_variables(tmp_path: Path) -> None:
    """One launcher a node, on this machine, with two workers each in place of eight.

    TP 2 × PP 2 takes the workers of both: no step is computed by one alone.
    """
    _, job = yaml.safe_load_all((MANIFESTS / "trainjob.yaml").read_text(encoding="utf-8"))
    trainer = job["spec"]["trainer"]
    assert {"--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=2"} <= set(trainer["args"])
    set_by_trainer = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(free_port()),
    }

    def pod(number: int) -> RunningJob:
        environ = environment_of({**set_by_trainer, "PET_NODE_RANK": str(number)})
        return RunningJob(tmp_path / "tensorboard" / "events", words(trainer, tmp_path), environ=environ, named=False)

    with pod(0) as first, pod(1) as second:
        results = [first.finish(), second.finish()]
    assert [result.code for result in results] == [0, 0], results[0].output[-3000:] + results[1].output[-3000:]
    losses = {**results[0].losses, **results[1].losses}
    assert sorted(losses) == [1, 2, 3]
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "3"
