"""Checks of a node's hardware find what is wrong, and an unfit node is left out until it is fit again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.elastic.config import ConfigError, ElasticConfig, HealthSetting, health_settings
from megatron.elastic.control.events import Event, Examined, Lifted, Lost, Readmitted, Wanted
from megatron.elastic.control.exits import Ending
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.quarantine import Quarantine
from megatron.elastic.control.requests import Drain
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent import health
from megatron.elastic.launch.agent.health import ClockCheck, DiskCheck, HealthThread, NetworkCheck, checks_of, examine
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.agent.node_conditions import NodeConditions, finding_at_start
from tests.unit.launch.serving import serve


def interface(sys: Path, name: str, state: str, hardware: bool = True) -> Path:
    folder = sys / "class" / "net" / name
    folder.mkdir(parents=True)
    (folder / "operstate").write_text(f"{state}\n")
    if hardware:
        (folder / "device").mkdir()
    return folder / "operstate"


def test_an_interface_that_was_up_and_goes_down_is_a_finding(tmp_path: Path) -> None:
    first, _ = interface(tmp_path, "eth0", "up"), interface(tmp_path, "eth1", "down")
    interface(tmp_path, "docker0", "down", hardware=False)
    check = NetworkCheck(sys=tmp_path)
    assert check.look() == ""
    first.write_text("down\n")
    assert check.look() == "network: eth0 is down"


def test_a_named_interface_must_be_there(tmp_path: Path) -> None:
    interface(tmp_path, "lo", "unknown", hardware=False)
    assert NetworkCheck(("lo", "ib0"), tmp_path).look() == "network: ib0 is absent"


def test_a_port_of_infiniband_that_was_active_and_is_not_is_a_finding(tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/mlx5_0/ports/1/state"
    port.parent.mkdir(parents=True)
    port.write_text("4: ACTIVE\n")
    check = NetworkCheck(sys=tmp_path)
    assert check.look() == ""
    port.write_text("1: DOWN\n")
    assert check.look() == "network: mlx5_0 port 1 is DOWN"


def test_a_disk_is_written_and_nothing_is_left(tmp_path: Path) -> None:
    assert DiskCheck(tmp_path, 0).look() == ""
    assert not list(tmp_path.iterdir())
    assert DiskCheck(tmp_path / "absent", 0).look() == f"disk: {tmp_path / 'absent'}: No such file or directory"
    assert "GiB free in" in DiskCheck(tmp_path, 1 << 60).look()


def test_a_disk_that_hangs_is_a_finding_for_as_long_as_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = threading.Event()
    monkeypatch.setattr(health, "_DISK_SECONDS", 0.05)
    monkeypatch.setattr(os, "fsync", lambda _: hanging.wait(60))
    check = DiskCheck(tmp_path, 0)
    assert "takes longer than 0.05 s" in check.look()
    assert "has not ended" in check.look()
    hanging.set()
    stuck = check._stuck
    assert stuck is not None
    stuck.join(60)
    assert check.look() == ""


def test_the_clock_has_an_answer_of_the_kernel() -> None:
    assert ClockCheck().look() in ("", "clock: it is not synchronized (chrony or another NTP service)")


def test_a_check_that_raises_is_a_finding_and_the_others_go_on(tmp_path: Path) -> None:
    class Broken:
        def look(self) -> str:
            raise ValueError("no driver")

    assert examine((Broken(), DiskCheck(tmp_path / "absent", 0))).startswith("Broken: no driver; disk: ")


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("gpu,clock", (HealthSetting("gpu"), HealthSetting("clock"))),
        ("gpu=/lib/x.so", (HealthSetting("gpu", path="/lib/x.so"),)),
        ("network", (HealthSetting("network"),)),
        ("network=ib0+ib1", (HealthSetting("network", names=("ib0", "ib1")),)),
        ("disk=/data", (HealthSetting("disk", path="/data"),)),
        ("disk=/data:50", (HealthSetting("disk", path="/data", free=50 << 30),)),
    ],
)
def test_checks_by_name(text: str, settings: tuple[HealthSetting, ...]) -> None:
    assert health_settings(text) == settings


@pytest.mark.parametrize("text", ["", "cpu", "disk", "disk=", "clock=1", "network=", "gpu,"])
def test_what_is_no_check_is_refused_by_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--elastic-health takes a list of gpu"):
        ElasticConfig(health=text)


def test_gpus_that_cannot_be_asked_are_refused_by_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--elastic-health gpu: cannot load"):
        checks_of(health_settings(f"gpu={tmp_path / 'absent.so'}"))


def test_a_finding_counts_the_second_time_and_is_gone_after_several_clean_looks() -> None:
    answers = ["", "down", "", "down", "down", *["", "", "down"], *6 * [""]]
    left = list(answers)

    class Source:
        def look(self) -> str:
            return left.pop(0) if left else ""

    loop, heard = Loop(), list[tuple[str, int]]()
    thread = HealthThread((Source(),), loop, lambda text: heard.append((text, len(left))), every=0.02)
    serve(loop, lambda: len(heard) == 2)
    thread.close()
    thread._thread.join(20)
    loop.close()
    assert [text for text, _ in heard] == ["down", ""]
    assert heard[0][1] <= len(answers) - 5 and heard[1][1] == 0, "after the second in a row, and after six clean ones"


def job() -> Generations:
    """Two nodes of two ranks, the four of which are members; a lost rank is started again."""
    state = Generations({0: Node("a", (0, 1)), 1: Node("b", (2, 3))}, True, quarantine=Quarantine(3))
    for rank in range(4):
        state.ranks[rank].standing, state.ranks[rank].incarnation = "member", 0
    state.decided = state.frozen = 1
    return state


def lose(state: Generations, rank: int) -> None:
    state.apply(Lost((Loss(rank, 0, "b", "signal SIGKILL", ending=Ending.KILLED),)))


def mended(state: Generations) -> None:
    state.apply(Examined(1, ""))


def needed(state: Generations) -> None:
    state.apply(Lifted(1, 0, "ranks [3] are needed", needed=True))


def admitted(state: Generations) -> None:
    state.apply(Readmitted((3,)))


@pytest.mark.parametrize("end", [mended, needed, admitted])
def test_lost_ranks_of_an_unfit_node_stay_out_until(end: Callable[[Generations], None]) -> None:
    state = job()
    state.apply(Examined(1, "GPU 1: XID 79"))
    lose(state, 3)
    assert not state.returns(3) and state.returns(0)
    state.apply(Lifted(1, 0, "its time is over"))
    assert not state.returns(3), "the time of a quarantine mends no hardware"
    end(state)
    assert state.returns(3)


def test_an_agent_examines_its_node_and_sends_its_ranks_away_until_it_is_fit(tmp_path: Path) -> None:
    state, loop, appended, disk = job(), Loop(), list[Event](), tmp_path / "disk"
    settings = ElasticConfig(health=f"disk={disk}")
    conditions = NodeConditions(settings, Timing.derive(0.004), 1, state, loop, appended.append)
    conditions.start()
    serve(loop, lambda: len(appended) == 2)
    disk.mkdir()
    serve(loop, lambda: len(appended) == 4)
    conditions.close()
    loop.close()
    finding = f"disk: {disk}: No such file or directory"
    assert appended == [Examined(1, finding), Wanted(Drain((2, 3))), Examined(1, ""), Readmitted((2, 3))]
    assert finding_at_start(settings) == ""
