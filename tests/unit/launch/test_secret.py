"""A job of several nodes has a secret or one line that says how to make one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.elastic.control import env
from megatron.elastic.launch.arguments import BadCommand, parse
from megatron.elastic.launch.secret import job_secret, webhook_url

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


URL = "https://chat.example/hooks/T0KEN"


@pytest.mark.parametrize(
    "words",
    [
        ["--elastic-webhook", URL],
        [f"--elastic-webhook={URL}"],
        [f"--elastic_webhook={URL}"],
        ["--elastic_webhook", URL],
        ["--elastic-webhook", "http://h/", f"--elastic-webhook={URL}"],
    ],
)
def test_workers_are_not_told_the_url_for_messages(words: list[str], tmp_path: Path) -> None:
    """Megatron writes all arguments to its log, to TensorBoard and into checkpoints."""
    script = tmp_path / "train.py"
    script.touch()
    job = parse([str(script), "--elastic", *words, "--lr", "1"], {})
    assert job.webhook == URL and job.arguments == ("--elastic", "--lr", "1")


def test_the_url_for_messages_comes_from_the_flag_a_file_or_the_environment(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    file, given = kept(tmp_path, URL + "\n"), {env.WEBHOOK: "http://environment/"}
    named = ["--elastic-webhook-file", file]
    job = parse([str(script), "--elastic", *named], given)
    assert job.webhook == URL and job.arguments == ("--elastic", *named) and URL not in repr(job)
    assert webhook_url("http://flag/", None, given) == "http://flag/"
    assert parse([str(script)], given).webhook == "http://environment/"
    assert parse([str(script)], {}).webhook == ""
    with pytest.raises(BadCommand, match="--elastic-webhook and --elastic-webhook-file exclude each other"):
        parse([str(script), *named, "--elastic-webhook", URL], {})


@pytest.mark.parametrize(
    "text", ["", "chat.example/T0KEN", "ftp://h/T0KEN", "http:///T0KEN", f"{URL}\n{URL}", f"{URL} x"]
)
def test_a_file_or_variable_without_a_url_is_refused_and_not_shown(text: str, tmp_path: Path) -> None:
    for file, environ, source in (
        (kept(tmp_path, text), {}, f"--elastic-webhook-file {tmp_path}/secret"),
        (None, {env.WEBHOOK: text or "T0KEN"}, env.WEBHOOK),
    ):
        with pytest.raises(ValueError, match=f"^{source} must hold one http") as caught:
            webhook_url(None, file, environ)
        assert "T0KEN" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_with_the_url_that_others_can_read_or_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--elastic-webhook-file .* chmod 600"):
        webhook_url(None, kept(tmp_path, URL, 0o644), {})
    with pytest.raises(ValueError, match=r"^--elastic-webhook-file .*/none: No such file .*: write the URL to it"):
        webhook_url(None, str(tmp_path / "none"), {})


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
