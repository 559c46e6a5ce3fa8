"""The proof of a machine's devices: its figures, its report, and what it refuses."""

from __future__ import annotations

import json
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.elastic.observe.events import EventRecord
from tools.proof import __main__ as proof
from tools.proof import report
from tools.proof.__main__ import main
from tools.proof.machine import DRAINED, Cores, Machine, Ran
from tools.proof.sections import SECTIONS, deviation, happened, mttr, phases, whole_again

KILLS = "".join(
    f"injected kill: rank {rank}, step {step}, {point} (where), wall time {wall}\n"
    for rank, step, point, wall in ((1, 4, "after_vote", 10.5), (2, 6, "mid_reduce", 12.5))
)


def record(kind: str, wall: float, rank: int = 0, incarnation: int = 0, **fields: Any) -> EventRecord:
    return EventRecord(kind, wall, round(wall * 1e9), rank, incarnation, 1, None, fields)


def committed(*walls: float) -> list[EventRecord]:
    return [record("step", wall, step=step, losses={"lm loss": 1.0}) for step, wall in enumerate(walls, 3)]


def proved(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return the machine whose devices ``main`` proves with ``flags``; no section runs."""
    machines: list[Machine] = []

    def prove(machine: Machine, *_: Any) -> dict[str, Any]:
        machines.append(machine)
        return {"sections": {}}

    monkeypatch.setattr(sys, "argv", ["tools.proof", *flags])
    monkeypatch.setattr(proof, "devices_of", lambda platform: 2)
    monkeypatch.setattr(proof, "prove", prove)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    return machines[0]


def test_the_mean_that_megatron_prints_with_its_second_step_is_taken_apart() -> None:
    lines = [f"iteration {step}/ 9 | lm loss: {loss}" for step, loss in ((3, 4.0), (4, 3.5), (5, 2.0))]
    assert Ran(0, "\n".join(lines), 1.0).losses == {3: 4.0, 4: 3.0, 5: 2.0}


def test_a_missing_step_is_no_small_deviation() -> None:
    reference = {3: 2.0, 4: 2.0, 5: 2.0}
    assert deviation(reference, {3: 2.0, 4: 2.002}) == pytest.approx(1e-3)
    assert deviation(reference, {3: 2.0, 5: 2.0}) == deviation(reference, {}) == float("inf")
    assert deviation(reference, dict.fromkeys(range(3, 7), 2.0)) == float("inf")


def test_the_time_to_repair_is_that_from_a_kill_to_the_next_commit() -> None:
    run = Ran(DRAINED, KILLS, 1.0, committed(10.0, 11.0, 12.0, 13.0, 17.0))
    assert mttr(run) == {"to_next_commit": 0.5, "normal_step": 1.0}
    assert [point for point, *_ in happened(KILLS)] == ["after_vote", "mid_reduce"]
    recoveries = [record("recovery", 1.0, seconds={"decide": 0.1}), record("recovery", 1.0, seconds={"decide": 0.3})]
    assert phases(recoveries) == {"decide": 0.2}
    back = [record("phases", 1.0, rank, 1) for rank in (1, 2)]
    assert whole_again(2)(back, KILLS) and not whole_again(2)(back[:1], KILLS) and not whole_again(3)(back, KILLS)


def test_a_job_that_failed_is_told_with_the_end_of_its_output() -> None:
    assert Ran(0, "x", 1.0).fault == Ran(DRAINED, "x", 1.0).fault == ""
    assert Ran(1, "no such device", 1.0).fault == "exit code 1\nno such device"


def test_both_reports_have_every_section(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"ranks": 2, "deviation": 1e-7, "fault": ""},
        {"ranks": 4, "deviation": float("inf"), "fault": "lost"},
    ]
    sections: dict[str, dict[str, Any]] = {name: {"passed": True, "seconds": 1.0} for name in SECTIONS}
    sections["parity"] = {"passed": False, "seconds": 2.0, "layouts": rows, "fault": ""}
    sections["library_edits"] = {"passed": None, "seconds": 0.0, "why": "one device"}
    found: dict[str, Any] = {"platform": "cuda", "began": "today", "seconds": 3.0, "sections": sections}
    report.write(found, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == found
    text = (tmp_path / "report.md").read_text()
    assert all(f"## {name}" in text for name in SECTIONS)
    assert "| parity | **failed** | 2 |" in text and "| library_edits | not possible here | 0 |" in text
    assert "| 4 | inf | lost |" in text and "- why: one device" in text


@pytest.mark.parametrize(
    ("platform", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")]
)
@pytest.mark.parametrize(("visible", "one"), [("6,7", "6"), ("GPU-8a,GPU-9b", "GPU-8a"), (None, "0")])
def test_jobs_on_one_device_use_the_first_that_the_user_lets_them_see(
    platform: str, variable: str, visible: str | None, one: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    if visible is not None:
        monkeypatch.setenv(variable, visible)
    machine = proved(("--platform", platform, "--out", str(tmp_path / "new")), monkeypatch)
    assert machine.environment(one_device=True)[variable] == one
    assert machine.environment().get(variable) == visible


def test_a_variable_that_is_named_says_which_device_jobs_on_one_device_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    flags = ("--platform", "cuda", "--one-device", "CUDA_VISIBLE_DEVICES=7", "--out", str(tmp_path / "new"))
    assert proved(flags, monkeypatch).environment(one_device=True)["CUDA_VISIBLE_DEVICES"] == "7"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--platform", "cuda", "--out", "{full}"), "the folder is not empty"),
        (("--platform", "a:B", "--out", "{new}"), "--one-device: which variable leaves one device of a:B visible?"),
        (("--platform", "cuda", "--out", "{new}", "--sections", "kills"), "its checkpoint is made by parity"),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    said: str,
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    words = [word.format(full=tmp_path / "full", new=tmp_path / "new") for word in flags]
    monkeypatch.setattr(sys, "argv", ["tools.proof", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("cores", [1, 4, 16])
def test_jobs_at_once_have_no_more_ranks_than_there_are_cores(tmp_path: Path, cores: int) -> None:
    machine = Machine("cpu", 1, {}, tmp_path, cores=Cores(cores))
    lock, running, most = threading.Lock(), set[int](), 0
    sizes = [1, 2, 4, 4, 2, 8, 1, 2]

    def job(number: int) -> int:
        nonlocal most
        with machine.cores.held(sizes[number]):
            with lock:
                running.add(number)
                ranks = sum(sizes[one] for one in running)
                assert ranks <= cores or len(running) == 1
                most = max(most, ranks)
            time.sleep(0.02)
            with lock:
                running.discard(number)
        return number

    assert machine.side_by_side([partial(job, number) for number in range(len(sizes))]) == list(range(len(sizes)))
    assert most >= min(cores, 8)


def test_a_call_that_raises_gives_its_cores_back(tmp_path: Path) -> None:
    machine = Machine("cpu", 1, {}, tmp_path, cores=Cores(2))

    def fails() -> None:
        with machine.cores.held(2):
            raise OSError("no such program")

    with pytest.raises(OSError, match="no such program"):
        machine.side_by_side([fails, fails])
    with machine.cores.held(2):
        pass
