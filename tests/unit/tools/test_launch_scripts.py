"""The launch scripts run, and every flag in them is one that the launcher and Megatron's parser know.

The scripts are executed as they are, with an interpreter of ours first in PATH
that writes down what it is called with instead of training.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.elastic.control import env
from megatron.elastic.launch.secret import job_secret

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"
SHELL = sorted([*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.slurm"), ROOT / ".ci" / "run"])
MANIFESTS = sorted((SCRIPTS / "kubernetes").glob("*.yaml"))
RECORDER = """#!{python}
import json, os, sys
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps({{"program": os.path.basename(sys.argv[0]), "argv": sys.argv[1:],
                              "environment": dict(os.environ)}}) + "\\n")
{then}
"""

# srun runs its command once, as it would on one node.
RUN_COMMAND = """
import subprocess
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
sys.exit(subprocess.call(command))
"""


def record(
    tmp_path: Path,
    script: str,
    arguments: list[str],
    environment: dict[str, str],
    status: int = 0,
    launcher: str = "",
    srun: str = RUN_COMMAND,
    inside: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """The arguments with which a script called its programs, in order.

    ``launcher``: what the interpreter does after it has written down its call; ``srun``: the same of srun; ``inside``:
    a command to run the script with; ``status``: the script's own, in the end.
    """
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, then in (("python", launcher), ("srun", srun), ("scontrol", 'print("node0")'), ("sleep", "")):
        (tools / name).write_text(RECORDER.format(python=sys.executable, then=then))
        (tools / name).chmod(0o755)
    log = tmp_path / "record"
    path = f"{tools}:{os.environ['PATH']}"
    base = {"PATH": path, "RECORD": str(log), "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        [*inside, "bash", str(SCRIPTS / script), *arguments],
        env=base | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture(scope="module")
def megatron_parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    from megatron.elastic.mcore.args.arguments import add_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    return add_arguments(add_megatron_arguments(parser))


def parsed(argv: list[str], parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, argparse.Namespace]:
    """(launcher's, Megatron's) reading of ``python -m megatron.elastic.launch …``; fails on an unknown flag."""
    from megatron.elastic.launch.arguments import build_parser

    assert argv[:2] == ["-m", "megatron.elastic.launch"]
    launcher = build_parser().parse_args(argv[2:])
    assert launcher.training_script == "pretrain_gpt.py"
    known, unknown = parser.parse_known_args(launcher.training_script_args)
    assert unknown == []
    return launcher, known


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_shell_scripts_parse_and_shellcheck_has_nothing_to_say(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, check=False).returncode == 0
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (requirements/dev.txt)")
    done = subprocess.run(
        ["shellcheck", "-x", "--severity=warning", str(script)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", ["pretrain_gpt_cpu.sh", "pretrain_gpt_cuda.sh", "pretrain_gpt_ascend.sh"])
def test_flags_of_a_launch_script_exist_and_hold_together(
    tmp_path: Path, megatron_parser: argparse.ArgumentParser, script: str
) -> None:
    paths = [str(tmp_path / name) for name in ("checkpoints", "tensorboard", "tokenizer", "data")]
    environment = {"NUM_NODES": "2", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
    calls = record(tmp_path, script, [*paths, "--train-iters", "7"], environment)
    launcher, megatron = parsed(calls[-1]["argv"], megatron_parser)
    assert megatron.elastic
    assert megatron.train_iters == 7  # flags after the paths win
    assert (megatron.save, megatron.data_path) == (paths[0], [paths[3]])
    if script != "pretrain_gpt_cpu.sh":
        assert (launcher.nnodes, launcher.node_rank, launcher.master_addr) == ("2", 1, "node0")
    workers = int(launcher.nproc_per_node) * int(launcher.nnodes.split(":")[-1])
    model = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
    assert workers % model == 0
    assert megatron.global_batch_size % (megatron.micro_batch_size * workers // model) == 0
    assert megatron.num_layers % megatron.pipeline_model_parallel_size == 0


def test_slurm_script_starts_a_launcher_a_node_that_outlives_others(
    tmp_path: Path, megatron_parser: argparse.ArgumentParser
) -> None:
    environment = {
        "SLURM_JOB_NODELIST": "node[0-3]",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_NODEID": "2",
        "SLURM_JOB_ID": "1",
    }
    # sbatch runs a copy; the job starts in the folder it was submitted from.
    paths = [str(tmp_path / "checkpoints"), "tensorboard", "tokenizer", "data"]
    calls = record(tmp_path, "pretrain_gpt.slurm", paths, environment)
    srun = next(call for call in calls if call["program"] == "srun")
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(srun["argv"])
    launcher, _ = parsed(calls[-1]["argv"], megatron_parser)
    assert (launcher.nnodes, launcher.node_rank, launcher.master_addr) == ("4", 2, "node0")
    secret = calls[-1]["environment"][env.SECRET]
    assert job_secret(None, {env.SECRET: secret}, alone=False) == secret == srun["environment"][env.SECRET]
    directives = [
        line.split()[1] for line in (SCRIPTS / "pretrain_gpt.slurm").read_text().splitlines() if "#SBATCH" in line
    ]
    assert {"--no-kill", "--requeue", "--signal=TERM@180", "--ntasks-per-node=1"} <= set(directives)


ON_SLURM = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "17"}

SEVERAL_TASKS = """
import subprocess
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
ends = os.environ["ENDS"].split()  # of each task; "lost": killed with its node
codes = [137 if end == "lost" else
         subprocess.call(command, env=os.environ | {"SLURM_NODEID": str(node), "END": end})
         for node, end in enumerate(ends)]
sys.exit(max(codes))
"""


@pytest.mark.parametrize(
    ("ends", "status", "requeued"),
    [
        ("0 0", 0, False),
        ("3 3", 3, True),
        ("4 4", 4, True),
        ("5 5", 5, False),
        ("1 1", 1, False),
        ("0 lost", 0, False),
        ("3 lost", 3, True),
        ("0 4", 0, False),
        ("3 4", 3, True),
        ("5 4", 5, False),
        ("lost lost", 137, False),
    ],
)
def test_slurm_script_acts_on_what_the_launchers_say_not_on_a_task_that_went_with_its_node(
    tmp_path: Path, ends: str, status: int, requeued: bool
) -> None:
    calls = record(
        tmp_path,
        "pretrain_gpt.slurm",
        [str(tmp_path / "checkpoints"), "tensorboard", "tokenizer", "data"],
        {**ON_SLURM, "ENDS": ends},
        status,
        'sys.exit(int(os.environ["END"]))',
        SEVERAL_TASKS,
    )
    asked = [call["argv"] for call in calls if call["program"] == "scontrol"]
    assert (["requeue", "17"] in asked) == requeued
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_slurm_script_meets_in_etcd_under_a_name_of_its_own_each_time_it_is_queued(
    tmp_path: Path, megatron_parser: argparse.ArgumentParser
) -> None:
    environment = {**ON_SLURM, "SLURM_NODEID": "1", "SLURM_RESTART_COUNT": "3", "ETCD_ENDPOINT": "e0:2379,e1:2379"}
    paths = [str(tmp_path / "checkpoints"), "tensorboard", "tokenizer", "data"]
    launcher, _ = parsed(record(tmp_path, "pretrain_gpt.slurm", paths, environment)[-1]["argv"], megatron_parser)
    assert (launcher.rdzv_backend, launcher.rdzv_endpoint) == ("etcd", "e0:2379,e1:2379")
    assert (launcher.rdzv_id, launcher.node_rank) == ("slurm-17-3", 1)


@pytest.mark.parametrize(
    ("given", "conf"),
    [
        ({}, ""),
        ({"JOIN_TIMEOUT": "90"}, "join_timeout=90"),
        ({"ETCD_ENDPOINT": "e:2379", "RUN_ID": "r"}, ""),
        ({"ETCD_ENDPOINT": "e:2379", "RUN_ID": "r", "ETCD_CONF": "protocol=https"}, "protocol=https"),
        (
            {"ETCD_ENDPOINT": "e:2379", "RUN_ID": "r", "ETCD_CONF": "protocol=https", "JOIN_TIMEOUT": "90"},
            "join_timeout=90,protocol=https",
        ),
    ],
)
def test_scripts_hand_on_how_long_to_wait_for_other_nodes(
    tmp_path: Path, megatron_parser: argparse.ArgumentParser, given: dict[str, str], conf: str
) -> None:
    paths = ["checkpoints", "tensorboard", "tokenizer", "data"]
    calls = record(tmp_path, "pretrain_gpt_cuda.sh", paths, {"NUM_NODES": "2", "NODE_RANK": "1", **given})
    launcher, _ = parsed(calls[-1]["argv"], megatron_parser)
    assert launcher.rdzv_conf == conf


@pytest.mark.parametrize("script", ["pretrain_gpt_cuda.sh", "pretrain_gpt_ascend.sh"])
@pytest.mark.parametrize(("nodes", "mirrors"), [("1", 1), ("2", 1), ("3", 2), ("16", 2)])
def test_scripts_ask_for_as_many_copies_as_there_are_other_nodes_to_hold_them(
    tmp_path: Path, megatron_parser: argparse.ArgumentParser, script: str, nodes: str, mirrors: int
) -> None:
    environment = {"NUM_NODES": nodes, "NNODES": nodes, "NODE_RANK": "0", "ETCD_ENDPOINT": "e:2379", "RUN_ID": "r"}
    calls = record(tmp_path, script, ["checkpoints", "tensorboard", "tokenizer", "data"], environment)
    launcher, megatron = parsed(calls[-1]["argv"], megatron_parser)
    assert megatron.elastic_mirrors == mirrors and launcher.rdzv_backend == "etcd"


def own_pid_namespace() -> list[str]:
    """A command that runs another as process 1, as a container does; empty where that is not allowed."""
    inside = ["unshare", "--pid", "--fork", "--kill-child"]
    return inside if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode == 0 else []


@pytest.mark.skipif(not own_pid_namespace(), reason="unshare --pid needs more rights than this user has")
@pytest.mark.parametrize(("status", "waits"), [(3, True), (4, True), (0, False), (1, False), (5, False)])
def test_a_pod_that_is_started_again_leaves_etcd_time_to_forget_the_run(
    tmp_path: Path, status: int, waits: bool
) -> None:
    """The launcher takes SIGTERM meanwhile, which a pod's first process alone is sent."""
    launcher = (
        "import signal, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({status}))\n"
        "os.kill(1, signal.SIGTERM)\n"
        "time.sleep(30)\n"
    )
    environment = {"NUM_NODES": "2", "NODE_RANK": "0", "ETCD_ENDPOINT": "e:2379", "RUN_ID": "r"}
    paths = ["checkpoints", "tensorboard", "tokenizer", "data"]
    calls = record(
        tmp_path, "pretrain_gpt_cuda.sh", paths, environment, status, launcher, inside=tuple(own_pid_namespace())
    )
    assert [call["argv"] for call in calls if call["program"] == "sleep"] == ([["40"]] if waits else [])


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_manifests_parse(manifest: Path) -> None:
    documents = list(yaml.safe_load_all(manifest.read_text()))
    assert documents and all({"apiVersion", "kind"} <= set(document) for document in documents)


def pod_of(job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of a job's specification and its container: with shared memory, a secret and the meaning of statuses."""
    actions = {
        status: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for status in rule.get("onExitCodes", {}).get("values", [])
    }
    # Status 1 of one launcher, such as a finding about its node, leaves the others alone.
    assert actions == {3: "Ignore", 4: "Ignore", 1: "FailIndex", 5: "FailJob"}
    assert job["backoffLimitPerIndex"] > 0, "FailIndex takes it"
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    (secret,) = (item["valueFrom"] for item in container["env"] if item["name"] == env.SECRET)
    assert set(secret) == {"secretKeyRef"}, "it stands in no manifest"
    return pod, container


def assert_waits_for_queued_pods(launcher: argparse.Namespace) -> None:
    """A pod may be queued for hours, or its node be gone; after 600 s the others would end with status 1."""
    assert launcher.rdzv_conf.partition(",")[0] == "join_timeout=86400"


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item.get("value", "1") for item in container["env"]}


def test_kubernetes_job_has_identity_shared_memory_and_exit_statuses(
    tmp_path: Path, megatron_parser: argparse.ArgumentParser
) -> None:
    service, job = yaml.safe_load_all((SCRIPTS / "kubernetes" / "pretrain-gpt.yaml").read_text())
    pod, container = pod_of(job["spec"])
    assert job["spec"]["completionMode"] == "Indexed"
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    environment = environment_of(container)
    assert int(environment["NUM_NODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    script = Path(container["command"][1]).name
    launcher, _ = parsed(record(tmp_path, script, container["args"], environment)[-1]["argv"], megatron_parser)
    assert launcher.master_addr == "pretrain-gpt-0.pretrain-gpt" and launcher.rdzv_backend == "static"
    assert_waits_for_queued_pods(launcher)


def test_jobset_finds_its_first_pod_and_restarts_no_living_one(
    tmp_path: Path, megatron_parser: argparse.ArgumentParser
) -> None:
    (jobset,) = yaml.safe_load_all((SCRIPTS / "kubernetes" / "jobset.yaml").read_text())
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 0} and jobset["spec"]["network"]["enableDNSHostnames"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    _, container = pod_of(job)
    environment = environment_of(container)
    assert int(environment["NUM_NODES"]) == job["completions"] == job["parallelism"] and replicated["replicas"] == 1
    script = Path(container["command"][1]).name
    launcher, _ = parsed(record(tmp_path, script, container["args"], environment)[-1]["argv"], megatron_parser)
    name = jobset["metadata"]["name"]  # JobSet: <set>-<replicated job>-<job>-<pod>.<subdomain, the set's name>
    assert launcher.master_addr == f"{name}-{replicated['name']}-0-0.{name}"
    assert_waits_for_queued_pods(launcher)


def test_trainjob_leaves_nodes_and_workers_to_its_runtime(
    megatron_parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, train = yaml.safe_load_all((SCRIPTS / "kubernetes" / "trainjob.yaml").read_text())
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod_of(replicated["template"]["spec"])
    trainer = train["spec"]["trainer"]
    # Trainer's torch policy sets these in each pod.
    for name, value in {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "pretrain-gpt-node-0-0.pretrain-gpt",
        "PET_MASTER_PORT": "29400",
    }.items():
        monkeypatch.setenv(name, value)
    launcher, megatron = parsed([*trainer["command"][1:], *trainer["args"]], megatron_parser)
    assert (launcher.nnodes, launcher.nproc_per_node, launcher.node_rank) == ("2", "8", 1)
    assert (launcher.master_addr, launcher.master_port) == ("pretrain-gpt-node-0-0.pretrain-gpt", 29400)
    assert_waits_for_queued_pods(launcher)
    workers = trainer["numNodes"] * trainer["numProcPerNode"]
    assert workers % (megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size) == 0
    assert megatron.elastic and megatron.save == megatron.load


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.ngc"])
def test_an_image_holds_what_its_steps_name_and_nothing_of_a_build(name: str) -> None:
    text = (ROOT / "docker" / name).read_text()
    for path in re.findall(r"(?:-r|source) ([\w./-]+)", text.partition("\nFROM")[2]):
        assert (ROOT / path).is_file(), path
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "build", "**/*.so"} <= set(ignored)
    assert not {"scripts", "requirements", "csrc", "pyproject.toml"} & set(ignored)


def test_kubernetes_etcd_is_where_the_job_looks_for_it(
    tmp_path: Path, megatron_parser: argparse.ArgumentParser
) -> None:
    service, budget, members = yaml.safe_load_all((SCRIPTS / "kubernetes" / "etcd.yaml").read_text())
    assert budget["spec"] == {"maxUnavailable": 1, "selector": members["spec"]["selector"]}, "two would be the store"
    name, count = members["metadata"]["name"], members["spec"]["replicas"]
    assert members["spec"]["serviceName"] == service["metadata"]["name"] == name and count % 2 == 1
    endpoint = ",".join(f"{name}-{member}.{name}:2379" for member in range(count))
    manifest = (SCRIPTS / "kubernetes" / "pretrain-gpt.yaml").read_text()
    assert endpoint in manifest, "the value to set is in the comment"
    _, job = yaml.safe_load_all(manifest)
    container = job["spec"]["template"]["spec"]["containers"][0]
    environment = {item["name"]: item.get("value", "1") for item in container["env"]} | {"ETCD_ENDPOINT": endpoint}
    script = Path(container["command"][1]).name
    launcher, _ = parsed(record(tmp_path, script, container["args"], environment)[-1]["argv"], megatron_parser)
    assert (launcher.rdzv_backend, launcher.rdzv_endpoint, launcher.rdzv_id) == ("etcd", endpoint, "pretrain-gpt")
    flags = members["spec"]["template"]["spec"]["containers"][0]["command"]
    peers = next(flag for flag in flags if flag.startswith("--initial-cluster="))
    assert all(f"{name}-{member}=http://{name}-{member}.{name}:2380" in peers for member in range(count))
    assert {"--auto-compaction-mode=periodic", "--auto-compaction-retention=5m"} <= set(flags)


def test_kubelet_kills_one_process_not_the_pod() -> None:
    (kubelet,) = yaml.safe_load_all((SCRIPTS / "kubernetes" / "kubelet.yaml").read_text())
    assert kubelet["singleProcessOOMKill"] is True
