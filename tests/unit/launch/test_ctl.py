"""Which job a request goes to: what ends one is never guessed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading

import pytest

from megatron.elastic.control.requests import Status
from megatron.elastic.control.socket_names import console_name, job_name, start_name
from megatron.elastic.ctl import CtlError, ask, choose, main


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As in ``ctl doctor | head -1``."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "megatron.elastic.ctl", "doctor", "--run-id", "no such job"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert done.returncode == 0 and done.stderr == ""


def test_the_one_job_that_is_left_is_not_taken_for_the_one_meant() -> None:
    with pytest.raises(CtlError, match=r"the only job on this machine is 'other'.*--run-id other, or --yes"):
        choose(None, {"other": [0]}, sure=False)
    assert choose(None, {"other": [2, 3]}, sure=True) == ("other", 2)
    assert choose("other", {"other": [0]}, sure=False) == ("other", 0)


@pytest.mark.parametrize("sure", [False, True])
def test_of_several_none_is_taken(sure: bool) -> None:
    with pytest.raises(CtlError, match=r"several jobs.*one, two.*--run-id"):
        choose(None, {"one": [0], "two": [0]}, sure)
    with pytest.raises(CtlError, match=r"job 'three' does not run on this machine; running: one$"):
        choose("three", {"one": [0]}, sure)


@pytest.mark.parametrize(("run_id", "meant"), [(None, "no job runs"), ("one", "job 'one' does not run")])
def test_without_a_job_the_answer_does_not_speak_of_several(run_id: str | None, meant: str) -> None:
    with pytest.raises(CtlError, match=rf"^{meant} on this machine: .* on a node of the job"):
        choose(run_id, {})


@pytest.mark.parametrize(
    "run_id", ["x" * 65, "x" * 4096, "ü" * 33, "two\nlines", "a\0b", " blank", "blank ", "\udcff", "\u2028"]
)
def test_a_run_id_that_no_socket_can_be_named_after_has_a_name_of_its_own(run_id: str) -> None:
    name = job_name(run_id)
    assert name == job_name(name) != run_id and len({name, job_name(run_id + "2"), job_name("2" + run_id)}) == 3
    assert not any(letter.isspace() or not letter.isprintable() for letter in name)
    for address in (console_name(run_id, (1 << 31) - 1), start_name(run_id, 1 << 22)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address)


@pytest.mark.parametrize("run_id", ["llama-7b", "x" * 64, "ü" * 32, "two words", "a/b~c"])
def test_any_other_run_id_is_the_name_of_its_job(run_id: str) -> None:
    assert job_name(run_id) == run_id


def test_an_agent_of_another_version_is_named_as_such() -> None:
    """Its status has other fields."""
    run_id = f"other-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(console_name(run_id, 0))
        listener.listen()

        def answer() -> None:
            console, _ = listener.accept()
            with console:
                console.recv(1 << 16)
                text = json.dumps({"answer": "status", "run_id": run_id, "of_a_later_version": 1}).encode()
                console.sendall(len(text).to_bytes(4, "big") + text)

        agent = threading.Thread(target=answer)
        agent.start()
        with pytest.raises(CtlError, match=rf"^job '{run_id}' runs with another version .*; use the ctl of the env"):
            ask(run_id, 0, Status())
        agent.join()


@pytest.mark.parametrize("do", ["drain", "stop"])
def test_what_ends_a_job_asks_for_its_name(
    do: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron.elastic.ctl.consoles", lambda: {"other": [0]})
    monkeypatch.setattr("megatron.elastic.ctl.ask", lambda *request: pytest.fail(f"asked {request}"))
    assert main([do]) == 1
    assert "--run-id other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("doctor --ranks 1", "doctor takes no --ranks; it is for drain and admit"),
        ("doctor --yes", "doctor takes no --yes; it is for drain and stop"),
        ("stop --ranks 1", "stop takes no --ranks: stop ends the whole job; it is for drain and admit"),
        ("reshape --tp 1 --pp 1 --dp 1 --ranks 0", "reshape takes no --ranks; it is for drain and admit"),
        ("status --ep 0", "status takes no --ep; it is for reshape"),
        ("admit --tp 0", "admit takes no --tp; it is for reshape"),
        ("drain --json", "drain takes no --json; it is for status"),
        ("checkpoint --watch", "checkpoint takes no --watch; it is for status"),
        ("status --store 127.0.0.1:1", "status takes no --store; it is for doctor"),
        ("drain --ranks=", "--ranks takes numbers like 4,5, got ''"),
        ("drain --ranks -4", "--ranks takes numbers like 4,5, got '-4'"),
    ],
)
def test_a_flag_that_a_command_has_no_use_for_is_refused_in_one_line(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron.elastic.ctl.ask", lambda *request: pytest.fail(f"asked {request}"))
    assert main(words.split()) == 1
    assert capsys.readouterr() == ("", f"error: {said}\n")
