"""``ctl doctor`` says what is missing on a machine and in a job that does not start, and how to mend it."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from megatron.elastic import ctl
from megatron.elastic.control.doctor import diagnose, reach, status_findings
from megatron.elastic.control.starting import ask_launcher, fingerprint
from megatron.elastic.launch.agent.starting import Starting
from megatron.elastic.launch.arguments import JobSpec, parse
from megatron.elastic.platform.findings import Finding
from megatron.elastic.platform.installation import check_installation, check_open_files
from tests.unit.control.test_status_text import STATUS

SECRET = "0123456789abcdef" * 2
SCRIPT = str(Path(__file__))


def job(*arguments: str) -> JobSpec:
    environ = {"MEGATRON_ELASTIC_SECRET": SECRET}
    return parse(["--rdzv-id", f"doctor-{os.getpid()}", *arguments, SCRIPT, "--elastic"], environ)


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


def test_a_launcher_tells_what_it_waits_for_and_for_how_long() -> None:
    spec = job("--nnodes", "3", "--node-rank", "1", "--master-addr", "10.1.1.1", "--master-port", "6000")
    starting = Starting(spec)
    with starting.waiting_for("the first agent (node 0) at 10.1.1.1:6000"):
        there = ask_launcher(spec.run_id, os.getpid())
    gone_on = ask_launcher(spec.run_id, os.getpid())
    starting.close()
    assert there is not None and gone_on is not None and ask_launcher(spec.run_id, os.getpid()) is None
    assert there.doing == "waits for the first agent (node 0) at 10.1.1.1:6000" and gone_on.doing == "goes on"
    assert (there.node, there.least, there.store) == (1, 3, (("10.1.1.1", 6000),)) and there.seconds < 60
    assert there.secret == fingerprint(SECRET) and SECRET not in msgspec.json.encode(there).decode()


def test_what_a_starting_job_lacks_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "6000")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        starting = Starting(replace(spec, master_port=port))
        start = ask_launcher(spec.run_id, os.getpid())
        starting.close()
        assert start is not None
        reached = by_subject(list(diagnose([start], [], [], {})))
    assert reached["store"].verdict == "ok" and fingerprint(SECRET) in reached["secret"].text
    refused = by_subject(list(diagnose([start], [], [], {})))
    assert refused["store"].verdict == "missing" and "start the first agent" in refused["store"].text
    assert refused["launcher"].verdict == "missing" and "node 1 of 2" in refused["launcher"].text


def test_a_host_that_has_no_address_and_one_that_does_not_answer_differ() -> None:
    def silent(*_: object) -> socket.socket:
        raise TimeoutError("timed out")

    assert "no such host" in reach("no-such-host.invalid", 6000).text
    assert "timed out): check the network and firewalls" in reach("10.0.0.1", 6000, silent).text


def test_a_job_that_has_met_and_does_not_step_is_told_by_its_workers() -> None:
    starting = msgspec.structs.replace(STATUS, state="starting")
    found = list(status_findings(starting))
    assert any(each.subject == "first step" and "without progress for" in each.text for each in found)
    assert any(each.subject == "loss" and "SIGKILL" in each.text for each in found)
    (stepping,) = (each for each in status_findings(STATUS) if each.subject == "job")
    assert stepping.verdict == "ok" and "training, step 120" in stepping.text


def machine(root: Path, driver: str = "") -> Path:
    (root / "dev/shm").mkdir(parents=True)
    if driver:
        (root / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").write_text(driver)
    return root


def test_the_machine_is_judged_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = by_subject(list(check_installation(machine(tmp_path / "plain"))))
    assert plain["packages"].verdict == plain["native parts"].verdict == plain["shared memory"].verdict == "ok"
    assert plain["driver"].verdict == "note"
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22"
    with_gpu = machine(tmp_path / "gpu", version)
    monkeypatch.setattr("megatron.elastic.platform.installation._version_of", lambda name: "2.13.0+cpu")
    unfit = by_subject(list(check_installation(with_gpu)))["driver"]
    assert unfit.verdict == "missing" and "NVIDIA 550.54.14, but torch 2.13.0+cpu has no CUDA" in unfit.text
    monkeypatch.setattr("megatron.elastic.platform.installation._version_of", lambda name: "2.13.0+cu130")
    assert "--gpus all" in by_subject(list(check_installation(with_gpu)))["driver"].text
    (with_gpu / "dev/nvidia0").touch()
    assert by_subject(list(check_installation(with_gpu)))["driver"].text == "NVIDIA 550.54.14, 1 GPUs"
    (with_gpu / "dev/shm").rmdir()
    assert "mount a tmpfs" in by_subject(list(check_installation(with_gpu)))["shared memory"].text


def test_a_package_that_is_too_old_or_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.1.0", "megatron-core": "0.17.1", "megatron-elastic": "0.1.0"}
    monkeypatch.setattr("megatron.elastic.platform.installation._version_of", versions.get)
    faults = [each.text for each in check_installation() if each.subject == "packages"]
    assert "torch is 2.1.0: pip install 'torch<2.16,>=2.11'" in faults
    assert any(fault.startswith("msgspec is not installed: pip install 'msgspec") for fault in faults)


def test_open_files_are_compared_with_what_the_job_needs() -> None:
    assert check_open_files(1).verdict == "ok"
    lacking = check_open_files(1 << 40)
    assert lacking.verdict == "missing" and f"ulimit -Hn {1 << 40}" in lacking.text


def test_the_command_ends_with_1_where_something_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        run = ["doctor", "--run-id", "no-job-of-this-name", "--store", f"127.0.0.1:{port}"]
        assert ctl.main(run) == 0
        assert f"127.0.0.1:{port} accepts connections" in capsys.readouterr().out
    assert ctl.main(run) == 1
    assert ctl.main(["status", "--store", "127.0.0.1:1"]) == 1
    assert "it is for doctor" in capsys.readouterr().err
