"""Megatron on a CPU: the same training, whatever the layout, with no CPU flag given.

Every layout continues one checkpoint written by (tp, pp, dp) = (1, 1, 1), since
Megatron seeds each pipeline stage's initial weights differently. Losses are read
from Megatron's own log lines (seven digits).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 1), (1, 1, 4), (1, 4, 2)]
ALONE = LAYOUTS[0]
SLOW = [(2, 2, 1), (1, 4, 2)]
QUICK = [layout for layout in LAYOUTS[1:] if layout not in SLOW]
FP32_ROUNDING = 3e-6
"""Largest relative difference of a loss allowed between layouts, over all steps."""

MODEL = shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 12
    --lr-warmup-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1
    --eval-interval 1000 --eval-iters 0 --split 98,1,1 --hidden-dropout 0 --attention-dropout 0
    --make-vocab-size-divisible-by 64 --use-distributed-optimizer --ckpt-format torch_dist
    --dist-ckpt-optim-fully-reshardable
""")
TRAIN = ["--train-iters", str(STEPS)]


def layout_flags(layout: tuple[int, int, int]) -> list[str]:
    """Flags of (tp, pp, dp)."""
    return ["--tensor-model-parallel-size", str(layout[0]), "--pipeline-model-parallel-size", str(layout[1])]


def job(name: str, world: int, *arguments: str) -> dict[str, Any]:
    return {"name": name, "world": world, "arguments": [*MODEL, *arguments], "seconds": 240}


def name_of(layout: tuple[int, int, int]) -> str:
    return "tp{}-pp{}-dp{}".format(*layout)


def run_jobs(folder: Path, jobs: Sequence[Mapping[str, Any]], packages: Path | None = None) -> dict[str, list[int]]:
    """Exit codes of every job's ranks; the logs lie in ``folder``. ``packages``: further ones that Megatron finds."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    found = os.pathsep.join(str(folder) for folder in (ROOT, packages) if folder is not None)
    environment = {**os.environ, "PYTHONPATH": found, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/integration/forked_ranks.py"), str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    codes: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return codes


def logs(folder: Path, name: str) -> str:
    """Output of all ranks of a job."""
    return "\n".join(path.read_text() for path in sorted(folder.glob(f"{name}.*.log")))


def losses(text: str) -> dict[int, float]:
    """Iteration → training loss, from Megatron's log lines."""
    found = re.findall(r"iteration\s+(\d+)/.*?lm loss: (\S+)", text)
    return {int(step): float(loss) for step, loss in found}


def gradient_norms(text: str) -> list[str]:
    """As printed, in order."""
    return re.findall(r"lm loss: .*?grad norm: (\S+)", text)


def run_all(folder: Path, jobs: Sequence[Mapping[str, Any]]) -> None:
    """Run the jobs, all forked from one process; they must end well."""
    for name, ranks in run_jobs(folder, jobs).items():
        assert set(ranks) == {0}, f"{name}: exit codes {ranks}\n{logs(folder, name)[-4000:]}"


def continued(layout: tuple[int, int, int], load: Sequence[str]) -> dict[str, Any]:
    """The job of ``layout`` that goes on from the common checkpoint."""
    return job(name_of(layout), layout[0] * layout[1] * layout[2], *layout_flags(layout), *load)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the logs of every run of the quick tests."""
    folder = tmp_path_factory.mktemp("layouts")
    common = str(folder / "common")
    load = ["--load", common, *TRAIN]
    save = [*TRAIN, "--save", common, "--save-interval", "1", "--exit-interval", "1"]
    run_all(
        folder,
        [
            job("common", 1, *layout_flags(ALONE), *save),
            *(continued(each, load) for each in (ALONE, *QUICK)),
            job("uninterrupted", 1, *layout_flags(ALONE), *TRAIN),
            job("sequence-parallel", 2, *layout_flags((2, 1, 1)), "--sequence-parallel", *load),
            job("bf16", 2, *layout_flags((2, 1, 1)), "--bf16", "--sequence-parallel", "--train-iters", "12"),
        ],
    )
    return folder


@pytest.fixture(scope="module")
def trained_wide(trained: Path) -> Path:
    """The same folder, with the logs of the widest layouts."""
    run_all(trained, [continued(each, ["--load", str(trained / "common"), *TRAIN]) for each in SLOW])
    return trained


def worst_difference(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Largest relative difference over the steps that both ran (they must be the same)."""
    assert one.keys() == other.keys() and len(one) == STEPS - 1, (one, other)
    return max(abs(one[step] - other[step]) / abs(one[step]) for step in one)


@pytest.mark.parametrize("layout", QUICK, ids=name_of)
def test_losses_do_not_depend_on_the_layout(trained: Path, layout: tuple[int, int, int]) -> None:
    alone = losses(logs(trained, name_of(ALONE)))
    assert worst_difference(alone, losses(logs(trained, name_of(layout)))) < FP32_ROUNDING


@pytest.mark.parametrize("layout", SLOW, ids=name_of)
def test_nor_do_they_on_a_wider_one(trained_wide: Path, layout: tuple[int, int, int]) -> None:
    alone = losses(logs(trained_wide, name_of(ALONE)))
    assert worst_difference(alone, losses(logs(trained_wide, name_of(layout)))) < FP32_ROUNDING


def test_sequence_parallel_gives_the_same_losses(trained: Path) -> None:
    alone = losses(logs(trained, name_of((1, 1, 1))))
    assert worst_difference(alone, losses(logs(trained, "sequence-parallel"))) < FP32_ROUNDING


def test_a_resumed_run_goes_on_as_if_never_stopped(trained: Path) -> None:
    """Bit for bit. Megatron's second log line averages the first two steps of a process: compared from the third."""
    stopped, never = logs(trained, name_of((1, 1, 1))), logs(trained, "uninterrupted")
    for step in range(4, STEPS + 1):
        assert losses(stopped)[step] == losses(never)[step]
    assert gradient_norms(stopped)[1:] == gradient_norms(never)[2:]


def test_the_losses_compared_do_move(trained: Path) -> None:
    """Equal losses would mean little if nothing was learnt between them."""
    alone = losses(logs(trained, name_of((1, 1, 1))))
    assert alone[STEPS] < alone[2] * 0.99


def test_bf16_learns(trained: Path) -> None:
    curve = losses(logs(trained, "bf16"))
    assert len(curve) == 12 and curve[12] < curve[1] * 0.95


def test_substitutions_are_printed_once_by_rank_0(trained: Path) -> None:
    name = name_of((1, 2, 2))
    said = [path for path in sorted(trained.glob(f"{name}.*.log")) if "substituted on cpu" in path.read_text()]
    assert [path.name for path in said] == [f"{name}.0.log"]
    table = said[0].read_text()
    for flag in ("--transformer-impl", "--distributed-backend", "--no-gradient-accumulation-fusion"):
        assert flag in table


def test_torchrun_and_our_launcher_train_alike_without_a_cpu_flag(tmp_path: Path) -> None:
    """Plain Megatron-LM, without --elastic."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = []
    for launcher in (["torch.distributed.run", "--log-dir", os.devnull], ["megatron.elastic.launch"]):
        command = [
            sys.executable,
            "-m",
            *launcher,
            "--nproc-per-node",
            "2",
            "--standalone",
            str(ROOT / "pretrain_gpt.py"),
            *MODEL,
            *layout_flags((1, 1, 2)),
            "--train-iters",
            "2",
        ]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        found.append(losses(done.stdout + done.stderr))
    assert sorted(found[0]) == [1, 2] and found[0] == found[1]
