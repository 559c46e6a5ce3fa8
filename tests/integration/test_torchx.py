"""torchx runs our component: a job on this machine to its end, and the commands that it hands to a cluster."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPONENT = f"{ROOT / 'scripts' / 'torchx_pretrain.py'}:pretrain"
SMALL = shlex.split("""
    --elastic --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 2 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 255 --eval-interval 1000 --eval-iters 0 --log-interval 1
""")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """torchx in a folder of its own: the environment that trains stays as it is."""
    folder = tmp_path_factory.mktemp("torchx")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, "-r", str(ROOT / "requirements" / "torchx.txt")], check=True, timeout=300)
    return folder


def torchx(packages: Path, tmp_path: Path, *arguments: str) -> str:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        [sys.executable, "-m", "torchx.cli.main", "run", *arguments],
        env={**os.environ, "PYTHONPATH": f"{packages}:{ROOT}", "PATH": path, "TORCHX_HOME": str(tmp_path)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.slow
def test_a_job_runs_to_its_end_on_this_machine(packages: Path, tmp_path: Path) -> None:
    local = ("-s", "local_cwd", "--scheduler_args", f"log_dir={tmp_path},prepend_cwd=True")
    text = torchx(packages, tmp_path, *local, "--wait", "--log", COMPONENT, "-j", "1x2", "--", *SMALL)
    assert re.search(r"iteration +2/ +2 ", text), text[-4000:]


@pytest.mark.slow
def test_several_nodes_meet_at_the_first_one_or_in_etcd(packages: Path, tmp_path: Path) -> None:
    cluster = ("--dryrun", "-s", "slurm", "--scheduler_args", "partition=p", COMPONENT, "-j", "2:4x8")
    secret = ("--secret_file", "/shared/secret")
    text = torchx(packages, tmp_path, *cluster, *secret, "--", *SMALL)
    launches = re.findall(r"bash -c .*megatron\.elastic\.launch .*", text.partition("SBATCH_SCRIPT")[2])
    assert len(launches) == 4
    for launch in launches:
        assert "--nnodes 2:4 --nproc-per-node 8" in launch and "--elastic-secret-file /shared/secret" in launch
        assert "--rdzv-backend c10d --rdzv-endpoint ${SLURM_JOB_NODELIST_HET_GROUP_0:=localhost}:29500" in launch
    text = torchx(packages, tmp_path, *cluster, *secret, "--etcd", "e0:2379,e1:2379", "--", *SMALL)
    script = text.partition("SBATCH_SCRIPT")[2]
    assert script.count("--rdzv-backend etcd --rdzv-endpoint e0:2379,e1:2379") == 4


@pytest.mark.slow
def test_several_nodes_need_a_secret(packages: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="several nodes need --secret_file"):
        torchx(packages, tmp_path, "--dryrun", "-s", "local_cwd", COMPONENT, "-j", "2x2", "--", *SMALL)
