"""A job of several nodes has a secret or one line that says how to make one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.elastic.control import env
from megatron.elastic.launch.arguments import BadCommand, parse
from megatron.elastic.launch.secret import job_secret

ROOT = Path(__file__).resolve().parents[3]
SECRET = "0123456789abcdef" * 2


def kept(folder: Path, text: str = SECRET + "\n", mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_where_it_comes_from(tmp_path: Path) -> None:
    file, other = kept(tmp_path), {env.SECRET: "f" * 32}
    assert job_secret(file, other, alone=False) == SECRET, "the flag is nearest"
    assert job_secret(None, {**other, env.SECRET_FILE: file}, alone=False) == SECRET
    assert job_secret(None, other, alone=True) == "f" * 32
    made = {job_secret(None, {}, alone=True) for _ in range(3)}
    assert len(made) == 3 and {len(bytes.fromhex(secret)) for secret in made} == {16}


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (SECRET, 0o640, "chmod 600"),
        (SECRET, 0o604, "chmod 600"),
        (SECRET[:30], 0o600, "at least 32 hex digits"),
        (SECRET + "0", 0o600, "an even number"),
        ("not hexadecimal at all, but long enough", 0o600, "hex digits"),
        ("01 " * 16, 0o600, "hex digits"),
        ("", 0o600, "hex digits"),
    ],
)
def test_a_file_that_is_not_one_is_refused(tmp_path: Path, text: str, mode: int, why: str) -> None:
    for file, environ, named in (
        (kept(tmp_path, text, mode), {}, "--elastic-secret-file"),
        (None, {env.SECRET_FILE: kept(tmp_path, text, mode)}, env.SECRET_FILE),
    ):
        with pytest.raises(ValueError, match=why) as caught:
            job_secret(file, environ, alone=True)
        assert str(caught.value).startswith(named) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match=f"--elastic-secret-file {path}: "):
            job_secret(str(path), {}, alone=False)
    with pytest.raises(ValueError, match=env.SECRET):
        job_secret(None, {env.SECRET: "short"}, alone=True)


@pytest.mark.parametrize(
    "where",
    [
        ["--nnodes", "2"],
        ["--nnodes", "1:2"],
        ["--rdzv-backend", "etcd", "--rdzv-endpoint", "e:1", "--rdzv-id", "j"],
    ],
)
def test_several_nodes_and_etcd_need_one(tmp_path: Path, where: list[str]) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(BadCommand, match="--elastic-secret-file") as caught:
        parse([*where, str(script)], {})
    assert env.SECRET in str(caught.value) and "openssl" in str(caught.value) and "\n" not in str(caught.value)
    job = parse([*where, str(script), "--elastic-secret-file", kept(tmp_path)], {})
    assert job.secret == SECRET and SECRET not in repr(job)


def test_without_one_the_launcher_ends_with_status_1_and_one_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    clean = {name: value for name, value in os.environ.items() if name not in (env.SECRET, env.SECRET_FILE)}
    done = subprocess.run(
        [sys.executable, "-m", "megatron.elastic.launch", "--nnodes", "2", "--node-rank", "0", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=clean,
        check=False,
    )
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if "error" in line)
    assert "--elastic-secret-file" in line and len(done.stderr.splitlines()) == 1
