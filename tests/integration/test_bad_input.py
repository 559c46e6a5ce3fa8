"""Bad input ends ``pretrain_gpt.py`` with one line that names the flag and the fix, exit code 1, no traceback."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]

GOOD = shlex.split("""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --train-iters 1 --tokenizer-type NullTokenizer
    --vocab-size 63 --eval-iters 0 --eval-interval 100
""")


@dataclass(frozen=True)
class Case:
    """``flags`` added to a good command line of ``world`` ranks give one error with ``words``, and ``more`` others."""

    name: str
    world: int
    flags: str
    words: tuple[str, ...]
    more: int = 0
    launcher: bool = True
    """The ranks find what the elastic launcher would have set."""


# A table: one row a line, which the formatter would break up.
# fmt: off
CASES = (
    Case("missing-data", 2, "--data-path no/such/text --split 98,1,1", ("--data-path no/such/text", "preprocess")),
    Case("damaged-data", 1, "--data-path {damaged} --split 98,1,1", ("--data-path", "not a Megatron index")),
    Case("cut-data", 1, "--data-path {cut} --split 98,1,1", ("--data-path", "has 100 bytes where", "it was cut")),
    Case("torn-index", 1, "--data-path {torn} --split 1,0,0", ("torn.idx is damaged", "after 0 of 1 sequences")),
    Case("foreign-tokens", 1, "--data-path {foreign} --split 1,0,0", ("token 60000 (number 3 ", "another tokenizer")),
    Case("empty-share", 1, "--data-path {good} --split 98,1,1", ("--split 98,1,1", "of the 1 documents", "give it")),
    Case("no-validation", 1, "--data-path {good} --split 1,0,0 --eval-iters 1", ("--split 1,0,0", "--eval-iters 0")),
    Case("too-few-ranks", 1, "--mock-data --tensor-model-parallel-size 2", ("too few ranks", "--nproc-per-node")),
    Case("global-batch", 1, "--mock-data --micro-batch-size 4 --global-batch-size 6", ("--global-batch-size 6",)),
    Case("heads", 2, "--mock-data --num-attention-heads 3 --tensor-model-parallel-size 2", ("-heads 3 is not",),
         more=1),
    Case("layers", 2, "--mock-data --num-layers 3 --pipeline-model-parallel-size 2", ("--num-layers 3",)),
    Case("unknown-flag", 1, "--mock-data --tensor-model-parralel-size 2", ("did you mean --tensor-model-par",)),
    Case("elastic-flag", 1, "--mock-data --elastic --elastic-mirrors -1", ("--elastic-mirrors",)),
    Case("context-parallel", 2, "--mock-data --context-parallel-size 2", ("--context-parallel-size", "needs a GPU")),
    Case("refused-with-elastic", 1, "--mock-data --elastic --data-parallel-random-init",
         ("--data-parallel-random-init", "not supported with --elastic")),
    Case("further-tokens", 1, "--mock-data --elastic --mtp-num-layers 1", ("--mtp-num-layers 1", "use rope")),
    Case("fp8", 1, "--mock-data --elastic --fp8-format hybrid", ("--fp8-format hybrid needs Transformer Engine",)),
    Case("strict-flags", 1, "--mock-data --elastic-strict-flags", ("--transformer-impl local", "gloo")),
    Case("no-launcher", 2, "--mock-data --elastic", ("python -m megatron.elastic.launch --nproc-per-node 2",),
         launcher=False),
    Case("two-sources", 1, "--mock-data --data-path {good}", ("--mock-data and --data-path", "leave one")),
    Case("no-number", 2, "--mock-data --load {tracked}", ("--load {tracked}", "holds 'abc'", "there are: 12, 3")),
    Case("no-number-args", 1, "--mock-data --load {tracked} --use-checkpoint-args", ("--load {tracked}", "'abc'")),
    Case("save-to-a-file", 2, "--mock-data --save-interval 1 --save {good}.bin/saved",
         ("--save {good}.bin/saved", "is not a folder")),
    Case("save-nowhere", 1, "--mock-data --save-interval 1 --save /proc/saved",
         ("--save /proc/saved cannot be written to (/proc: ",)),
    Case("events-to-a-file", 1, "--mock-data --elastic --elastic-event-log {good}.bin", ("--elastic-event-log",)),
    Case("all-at-once", 2, "--mock-data --elastic --elastic-mirrors -1 --data-parallel-random-init "
         "--num-attention-heads 3 --tensor-model-parallel-size 2 --load {tracked} --save {good}.bin --no-such-flag",
         ("--num-attention-heads 3",), more=6),
    Case("no-tokenizer", 2, "--mock-data --tokenizer-type TikTokenizer --tokenizer-model no/such.json",
         ("--tokenizer-type TikTokenizer --tokenizer-model no/such.json: the tokenizer cannot be loaded",)),
    Case("no-tokenizer-model", 1, "--mock-data --tokenizer-type SentencePieceTokenizer", ("needs --tokenizer-model",)),
    Case("other-tokenizer", 1, "--mock-data --tokenizer-type SentencePieceTokenizer --tokenizer-model {good}.bin",
         ("--tokenizer-model {good}.bin: the tokenizer cannot be loaded (RuntimeError: ",)),
    Case("megatrons-own-check", 1, "--mock-data --weight-decay-incr-style linear",
         ("args.start_weight_decay is not None",)),
    Case("no-longer", 2, "--mock-data --checkpoint-activations", ("--checkpoint-activations", "--recompute-activ")),
    Case("no-values", 2, "--mock-data --init-model-with-meta-device", ("--init-model-with-meta-device", "--load")),
    Case("another-model", 2, "--mock-data --position-embedding-type mrope --mrope-section 1 1 2", ("use rope",)),
    Case("configuration", 2, "--mock-data --disable-bias-linear --num-experts 2 --moe-router-topk 1",
         ("--moe-router-pre-softmax when topk is 1",)),
)
# fmt: on


@dataclass(frozen=True)
class Outputs:
    """Folder with the logs of every case, the paths that they name, and the exit codes of their ranks."""

    folder: Path
    data: dict[str, Path]
    codes: dict[str, list[int]]


def datasets(folder: Path) -> dict[str, Path]:
    """Name → prefix of a data set: a good one and what can become of it."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder.mkdir(exist_ok=True)
    found = {name: folder / name for name in ("good", "damaged", "cut", "torn", "foreign")}
    found["damaged"].with_suffix(".bin").write_bytes(b"\0" * 64)
    found["damaged"].with_suffix(".idx").write_bytes(b"something else, long enough to hold a header")
    for name in ("good", "cut", "torn", "foreign"):
        builder = IndexedDatasetBuilder(f"{found[name]}.bin", dtype=np.uint16)
        tokens = np.arange(400, dtype=np.uint16) % 63
        tokens[3] = 60000 if name == "foreign" else 3
        builder.add_document(tokens, [400])
        builder.finalize(f"{found[name]}.idx")
    os.truncate(f"{found['cut']}.bin", 100)
    found["tracked"] = folder / "tracked"
    for number in (3, 12):
        (found["tracked"] / f"iter_{number:07d}").mkdir(parents=True)
    (found["tracked"] / "latest_checkpointed_iteration.txt").write_text("abc")
    with open(f"{found['torn']}.idx", "r+b") as index:
        index.seek(-8, os.SEEK_END)
        index.write(b"\0" * 8)
    return found


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """The outcome of every case."""
    folder = tmp_path_factory.mktemp("bad")
    data = datasets(folder)
    jobs = [
        {
            "name": case.name,
            "world": case.world,
            "seconds": 120,
            "arguments": [*GOOD, *shlex.split(case.flags.format(**data))],
            "environ": {"MEGATRON_ELASTIC_RUN_ID": "bad-input"} if case.launcher else {},
        }
        for case in CASES
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/integration/forked_ranks.py"), str(folder / "jobs.json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Outputs(folder, data, json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_one_line_a_fault_and_exit_code_1(outputs: Outputs, case: Case) -> None:
    said = [path.read_text() for path in sorted(outputs.folder.glob(f"{case.name}.[0-9].log"))]
    assert outputs.codes[case.name] == [1] * case.world, said
    # With groups up, torch names the rank in front.
    errors = [line for text in said for line in text.splitlines() if re.match(r"(\[rank\d\]: )?error: ", line)]
    assert len(errors) == 1 + case.more, f"{len(errors)} error lines: {said}"
    words = [word.format(**outputs.data) for word in case.words]
    assert any(all(word in error for word in words) for error in errors), errors
    assert not any("Traceback" in text for text in said), said


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(taken.getsockname()[1]),
        }
        done = subprocess.run(
            [sys.executable, str(ROOT / "pretrain_gpt.py"), *GOOD, "--mock-data"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "--master-port" in errors[0], done.stderr[-2000:]
    assert "Traceback" not in done.stderr


def test_the_launchers_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "megatron.elastic.launch",
                "--nproc-per-node",
                "1",
                "--master-addr",
                "127.0.0.1",
                "--master-port",
                str(taken.getsockname()[1]),
                str(ROOT / "pretrain_gpt.py"),
                "--elastic",
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    assert done.returncode == 1
    errors = done.stderr.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ") and "--master-port" in errors[0], errors


def with_shared_memory(size: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """An elastic job of two ranks where ``/dev/shm`` has ``size``."""
    command = [
        sys.executable,
        "-m",
        "megatron.elastic.launch",
        "--nproc-per-node",
        "2",
        str(ROOT / "pretrain_gpt.py"),
        *GOOD,
        "--mock-data",
        "--elastic",
        *flags,
    ]
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs -o size={size} none /dev/shm && {shlex.join(command)}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def launched(*flags: str) -> subprocess.CompletedProcess[str]:
    """An elastic job of two ranks."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "megatron.elastic.launch",
            "--nproc-per-node",
            "2",
            str(ROOT / "pretrain_gpt.py"),
            *GOOD,
            "--mock-data",
            "--elastic",
            "--ckpt-format",
            "torch_dist",
            *flags,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def cut_data(saved: Path) -> None:
    os.truncate(next(saved.glob("iter_0000001/*.distcp")), 100)


def lost_index(saved: Path) -> None:
    (saved / "iter_0000001" / ".metadata").unlink()


def no_files(saved: Path) -> None:
    for path in (saved / "iter_0000001").iterdir():
        path.unlink()


def wrong_tracker(saved: Path) -> None:
    (saved / "latest_checkpointed_iteration.txt").write_text("77")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_one_line(tmp_path: Path) -> None:
    done = launched("--save", str(tmp_path / "saved"), "--save-interval", "1")
    assert done.returncode == 0, done.stderr[-2000:]
    for damage in (cut_data, lost_index, no_files):
        folder = tmp_path / damage.__name__
        shutil.copytree(tmp_path / "saved", folder)
        damage(folder)
        resumed = launched("--load", str(folder), "--train-iters", "2", "--override-opt-param-scheduler")
        assert resumed.returncode == 1
        errors = [line for line in (resumed.stdout + resumed.stderr).splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and f"--load {folder}" in errors[0] and "--ckpt-step" in errors[0], errors
        # torch logs where it looked for its index.
        assert damage is lost_index or "Traceback" not in resumed.stdout + resumed.stderr
    wrong_tracker(tmp_path / "saved")
    resumed = launched("--load", str(tmp_path / "saved"), "--train-iters", "2", "--override-opt-param-scheduler")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert "iter_0000077 is skipped: it is not there" in resumed.stdout + resumed.stderr, "an older one verifies"


def can_mount() -> bool:
    """Return whether a mount namespace may be made here."""
    probe = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="unshare --mount and mount need more rights than this user has")
def test_a_tiny_shared_memory_mount_is_no_matter_for_links_and_one_line_for_loader_workers() -> None:
    alone = with_shared_memory("16k", "--num-workers", "0")
    assert alone.returncode == 0, alone.stdout[-2000:] + alone.stderr[-2000:]
    refused = with_shared_memory("4k", "--num-workers", "2")
    assert refused.returncode == 1
    errors = [line for line in (refused.stdout + refused.stderr).splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "/dev/shm" in errors[0] and "--num-workers 0" in errors[0], errors


def checked(folder: Path, *flags: str, secret: str = "5e" * 16) -> subprocess.CompletedProcess[str]:
    """``--elastic-check`` of a job of four nodes, of which this is the second: no other is there."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "megatron.elastic.launch",
            "--nproc-per-node",
            "2",
            "--nnodes",
            "4",
            "--node-rank",
            "1",
            "--master-addr",
            "127.0.0.1",
            str(ROOT / "pretrain_gpt.py"),
            *GOOD,
            *([] if "--data-path" in flags else ["--mock-data"]),
            "--elastic",
            "--elastic-check",
            "--elastic-event-log",
            str(folder / "events"),
            "--save",
            str(folder / "saved"),
            "--save-interval",
            "5",
            "--ckpt-format",
            "torch_dist",
            *flags,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MEGATRON_ELASTIC_SECRET": secret},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_elastic_check_tells_what_is_substituted_trains_nothing_and_writes_nothing(tmp_path: Path) -> None:
    done = checked(tmp_path, "--global-batch-size", "8", "--delay-wgrad-compute", "--elastic-mirrors", "9")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "--transformer-impl" in done.stdout and "--delay-wgrad-compute" in done.stdout
    assert "warning: --elastic-mirrors 9 asks for more copies than 8 ranks can hold" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("--elastic-check: nothing is refused")
    assert "iteration" not in done.stdout and not list(tmp_path.iterdir())


def test_elastic_check_tells_every_refusal_also_those_of_the_launchers_flags(tmp_path: Path) -> None:
    done = checked(tmp_path, "--elastic-mirrors", "-1", "--elastic-spares", "-2", "--fp8-format", "hybrid", secret="")
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    words = ("--elastic-mirrors", "--elastic-spares", "--fp8-format", "--global-batch-size 2", "--elastic-secret-file")
    assert [sum(word in error for error in errors) for word in words] == [1] * 5, errors
    assert len(errors) == 5 and "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_elastic_check_reads_the_faults_to_inject_and_the_schedule_of_rates(tmp_path: Path) -> None:
    inject = ("--elastic-allow-inject", "--elastic-inject", "kill:rank=1,step=2,point=typo")
    done = checked(tmp_path, *inject, "--lr-warmup-iters", "9999", "--global-batch-size", "8")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(errors) == 2 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert "--lr-warmup-iters 9999 must be less than" in errors[0] and "typo" in errors[1]
    absent = ("--elastic-allow-inject", "--elastic-inject", "kill:rank=99,step=2")
    done = checked(tmp_path, *absent, "--global-batch-size", "8")
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and "rank=99 is not in this job: name ranks from 0 to 7" in error


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--tokenizer-type TikTokenizer --tokenizer-model no/such.json --data-path no/data",
            "no/data.idx is not there; --tokenizer-model no/such.json: the tokenizer cannot be loaded",
        ),
        ("--data-path {foreign} --split 1,0,0", "token 60000 (number 3 of "),
        ("--elastic-health disk={foreign}", "this node is not fit (--elastic-health): disk: "),
    ],
)
def test_elastic_check_loads_the_tokenizer_reads_tokens_and_examines_the_node(
    tmp_path: Path, flags: str, said: str
) -> None:
    data = {name: str(path) for name, path in datasets(tmp_path / "data").items()}
    (tmp_path / "job").mkdir()
    done = checked(tmp_path / "job", "--global-batch-size", "8", *shlex.split(flags.format(**data)))
    wanted = said.split("; ")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(errors) == len(wanted), done.stderr[-2000:]
    assert all(words in error for words, error in zip(wanted, errors, strict=True)), errors
    assert "Traceback" not in done.stderr and "nothing is refused" not in done.stdout
    assert not list((tmp_path / "job").iterdir())


def newer(folder: Path) -> Path:
    """A checkout beside the installed package whose megatron.core says that it is 0.21.1."""
    core = folder / "Megatron-LM" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text('__version__ = "0.21.1"')
    (core / "__init__.py").write_text('raise AssertionError("its code must not run")')
    return core.parents[1]


def started(checkout: Path, *launcher: str) -> list[str]:
    """The lines of an error that a start with ``checkout`` in PYTHONPATH prints before it ends with status 1."""
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "pretrain_gpt.py"), *GOOD, "--mock-data", "--elastic"],
        env={**os.environ, "PYTHONPATH": f"{checkout}:{ROOT}", "OMP_NUM_THREADS": "1", "ELASTIC_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-2000:]
    return [line for line in (done.stdout + done.stderr).splitlines() if "0.21.1" in line]


@pytest.mark.parametrize("launcher", [(), ("-m", "megatron.elastic.launch", "--nproc-per-node", "2")])
def test_a_megatron_core_that_was_never_tested_is_one_line(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """It names the version found, where, the range and the fix; nothing of that release is imported."""
    checkout = newer(tmp_path)
    (line,) = started(checkout, *launcher)
    for word in ("error: megatron-core 0.21.1", str(checkout), ">=0.17.1,<0.20", "pip install", "PYTHONPATH"):
        assert word in line
