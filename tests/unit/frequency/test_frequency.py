"""Clocks are set, verified and put back: by the owner, or by the guard when the owner dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from megatron.elastic import _frequency
from megatron.elastic.platform.frequency import (
    Applied,
    FrequencyUnavailable,
    NativeFrequency,
    NoFrequency,
    frequency_of,
    open_frequency,
)
from megatron.elastic.platform.frequency_guard import guard


def policy(sysfs: Path, number: int, name: str) -> int:
    text = (sysfs / f"devices/system/cpu/cpufreq/policy{number}/scaling_{name}_freq").read_text()
    return int(text or -1)  # a plain file, unlike sysfs, is empty for an instant while it is written


def children() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


# --- NVML ----------------------------------------------------------------------


@pytest.mark.parametrize("device", ["0", "00000000:1B:00.0", "GPU-00000000-1111-2222-3333-444444444444"])
def test_a_gpu_clock_is_locked_seen_and_unlocked(compiled, state, device):
    before = children()
    with NativeFrequency("nvml", device, str(compiled["nvml"])) as control:
        assert control.available() and "Stand-in GPU" in control.why()
        limits = control.limits()
        assert (limits.min_khz, limits.max_khz) == (600_000, 1_980_000)  # those of the highest memory clock
        assert list(limits.steps_khz) == sorted(limits.steps_khz) and len(limits.steps_khz) == 6
        assert control.current() == 1_980_000 and control.power_mw() == 412_345
        assert not state.exists() and children() == before  # nothing touched, nobody started
        assert control.set(1_300_000) == Applied(1_300_000, 1_500_000, 1_500_000, True)
        assert state.read_text() == "1500 1 0\n"
        assert control.set(5_000_000).set_khz == 1_980_000 and control.set(1).set_khz == 600_000
        assert len(children() - before) == 1
    assert state.read_text() == "0 1 0\n" and children() == before
    control.restore()


def test_more_power_is_allowed_before_the_clock_rises_and_the_limit_is_put_back(compiled, state):
    limit = state.with_name(f"{state.name}.power")
    with NativeFrequency("nvml", "0", str(compiled["nvml"])) as control:
        control.set(1_200_000)
        assert not limit.exists()
        assert control.set(1_980_000, more_power=True).verified
        assert limit.read_text() == "520000\n"
        control.set(900_000)
        assert limit.read_text() == "520000\n", "a limit above what is drawn costs nothing; it goes with the clock"
    assert not limit.exists() and state.read_text() == "0 1 0\n"


def test_a_power_limit_is_put_back_when_its_owner_is_killed(compiled, state):
    limit = state.with_name(f"{state.name}.power")
    limit.write_text("300000\n")  # an operator's own
    script = (
        "import sys, time\nfrom megatron.elastic.platform.frequency import NativeFrequency\n"
        "NativeFrequency('nvml', '0', sys.argv[1]).set(1_980_000, more_power=True)\n"
        "print('set', flush=True)\ntime.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(compiled["nvml"])], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "set\n"
    assert limit.read_text() == "520000\n"
    owner.kill()
    until = time.monotonic() + 30
    while limit.read_text() != "300000\n" and time.monotonic() < until:
        time.sleep(0.005)
    assert limit.read_text() == "300000\n"
    owner.communicate(timeout=30)


def test_a_throttled_gpu_is_reported_as_it_runs(compiled, state):
    state.write_text("0 1 900\n")
    with NativeFrequency("nvml", "0", str(compiled["nvml"])) as control:
        assert control.set(1_755_000) == Applied(1_755_000, 1_755_000, 900_000, False)


def test_without_permission_one_clear_line_and_no_guard(compiled, state):
    state.write_text("0 0 0\n")
    before = children()
    control = open_frequency("nvml", "0", str(compiled["nvml"]))
    with pytest.raises(FrequencyUnavailable) as refused:
        control.set(1_200_000)
    text = str(refused.value)
    assert "\n" not in text and "nvmlDeviceSetGpuLockedClocks: Insufficient Permissions" in text and "root" in text
    assert children() == before and state.read_text() == "0 0 0\n"
    assert control.power_mw() == 412_345  # reading still works


def test_missing_libraries_devices_and_symbols_are_one_line(compiled, state, tmp_path):
    for control, says in (
        (open_frequency("nvml", "0", str(tmp_path / "none.so")), "cannot load"),
        (open_frequency("nvml", "7", str(compiled["nvml"])), "nvmlDeviceGetHandleByIndex: Invalid Argument"),
        (open_frequency("nvml", "GPU-1", str(compiled["nvml"])), "Not Found"),
        (open_frequency("nvml", "first", str(compiled["nvml"])), "not an index"),
        (open_frequency("dcmi", "0", str(compiled["nvml"])), "no dcmi_init"),
        (open_frequency("dcmi", "9", str(compiled["dcmi"])), "no NPU '9'"),
        (open_frequency("dcmi", "4:x", str(compiled["dcmi"])), "neither an index nor card:device"),
        (open_frequency("cpufreq", "0", str(tmp_path)), "no frequency control"),
        (open_frequency("cpufreq", "zero", str(tmp_path)), "is not like 0-3,8"),
    ):
        assert isinstance(control, NoFrequency) and not control.available()
        assert says in control.why() and "\n" not in control.why()
        assert control.why().startswith("frequency axis off")
        with pytest.raises(FrequencyUnavailable):
            control.set(1)
        control.restore()
        assert control.power_mw() is None


def test_without_nvidias_package_one_line_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_frequency("nvml", "0").why().endswith("need the package nvidia-ml-py: pip install nvidia-ml-py")


# --- DCMI ----------------------------------------------------------------------


@pytest.mark.parametrize("device", ["3", "4:1"])
def test_an_npu_changes_its_working_level_and_gets_it_back(compiled, state, device):
    with NativeFrequency("dcmi", device, str(compiled["dcmi"])) as control:
        assert control.why() == "DCMI, card 4 device 1"
        assert control.limits().steps_khz == (1_000_000, 1_300_000, 1_600_000)
        assert control.current() == 1_600_000 and control.power_mw() == 310_500
        assert control.set(1_200_000) == Applied(1_200_000, 1_300_000, 1_300_000, True)
        assert state.read_text().startswith("3 ")
        control.set(1_600_000)
        assert state.read_text().startswith("0 ")  # of the two levels at 1.6 GHz, the one with more compute
    assert state.read_text().startswith("2 ")  # as found


def test_an_npu_without_working_levels_or_permission_says_so(compiled, state):
    state.write_text("2 1 0\n")
    control = open_frequency("dcmi", "3", str(compiled["dcmi"]))
    assert not control.available() and "not supported by this device" in control.why()
    state.write_text("2 0 1\n")
    with pytest.raises(FrequencyUnavailable, match="not permitted"):
        open_frequency("dcmi", "3", str(compiled["dcmi"])).set(1_000_000)


# --- cpufreq ---------------------------------------------------------------------


def test_cpu_policies_are_narrowed_and_widened_again(sysfs):
    with NativeFrequency("cpufreq", "0-3", str(sysfs)) as control:
        assert control.why() == "cpufreq, 2 policies, 4 CPUs"
        assert control.current() == 2_500_000
        assert control.set(1_234_567) == Applied(1_234_567, 1_234_567, 2_500_000, True)
        assert all(policy(sysfs, n, side) == 1_234_567 for n in (0, 2) for side in ("min", "max"))
        control.set(2_000_000)
        control.set(900_000)
        assert policy(sysfs, 2, "min") == policy(sysfs, 2, "max") == 900_000
        assert control.set(9_000_000).set_khz == 3_000_000
    assert [policy(sysfs, n, side) for n in (0, 2) for side in ("min", "max")] == [800_000, 2_800_000] * 2


def test_only_policies_of_the_asked_cpus_are_touched_and_shared_ones_named(sysfs):
    with NativeFrequency("cpufreq", "3", str(sysfs)) as control:
        assert "1 policies, 2 CPUs (1 of them shared with others)" in control.why()
        control.set(1_000_000)
        assert policy(sysfs, 0, "max") == 2_800_000 and policy(sysfs, 2, "max") == 1_000_000


def test_listed_frequencies_are_the_steps(sysfs):
    for number, text in ((0, "1000000 2000000 3000000"), (2, "3000000 2000000 500000")):
        (sysfs / f"devices/system/cpu/cpufreq/policy{number}/scaling_available_frequencies").write_text(text + "\n")
    with NativeFrequency("cpufreq", "0,2", str(sysfs)) as control:
        assert control.limits().steps_khz == (2_000_000, 3_000_000)
        assert control.set(2_100_000).set_khz == 3_000_000


def test_power_is_the_mean_since_the_call_before_and_survives_a_wrap(sysfs):
    energy = sysfs / "class/powercap/intel-rapl:0/energy_uj"
    control = NativeFrequency("cpufreq", "0", str(sysfs))
    assert control.power_mw() is None
    began = time.monotonic()
    time.sleep(0.02)
    energy.write_text("400\n")  # 4,999,400 microjoules on, past the wrap at 5,000,000
    power = control.power_mw()
    assert power is not None and power >= 4_999_400 / 1000 / (time.monotonic() - began)
    energy.unlink()
    assert control.power_mw() is None


def test_files_that_cannot_be_written_are_one_line_and_half_done_work_is_undone(sysfs):
    blocked = sysfs / "devices/system/cpu/cpufreq/policy2/scaling_max_freq"
    blocked.unlink()
    blocked.mkdir()  # refuses also a root user's write
    (sysfs / "devices/system/cpu/cpufreq/policy2/scaling_min_freq").write_text("800000\n")
    control = open_frequency("cpufreq", "0-3", str(sysfs))
    before = children()
    with pytest.raises(FrequencyUnavailable, match="scaling_max_freq") as refused:
        control.set(1_000_000)
    assert "\n" not in str(refused.value)
    assert policy(sysfs, 0, "min") == 800_000 and policy(sysfs, 0, "max") == 2_800_000
    assert children() == before


def test_read_only_policies_ask_for_write_access(sysfs):
    if os.geteuid() == 0:
        pytest.skip("root may write anything")
    for name in ("scaling_min_freq", "scaling_max_freq"):
        (sysfs / "devices/system/cpu/cpufreq/policy0" / name).chmod(0o444)
    with pytest.raises(FrequencyUnavailable, match="write access"):
        open_frequency("cpufreq", "0", str(sysfs)).set(1_000_000)


def test_a_user_without_rights_is_told_so(sysfs):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    shared = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(sysfs, shared / "sys")
        shared.chmod(0o755)
        driver = _frequency.Driver("cpufreq", "0", str(shared / "sys"))
        os.seteuid(65534)
        try:
            with pytest.raises(_frequency.NotPermitted, match="scaling_max_freq: Permission denied"):
                driver.set(1_000_000)
        finally:
            os.seteuid(0)
        assert policy(shared / "sys", 0, "max") == 2_800_000
    finally:
        shutil.rmtree(shared)


def test_this_machine_answers_for_its_own_cpus():
    control = frequency_of("cpu")
    assert "\n" not in control.why()
    if control.available():
        assert control.limits().min_khz <= control.limits().max_khz
    else:
        assert control.why().startswith("frequency axis off")
    assert not frequency_of("tpu").available()


def test_ranks_that_share_all_cpus_leave_their_clocks_alone(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(os.cpu_count() or 1)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    control = frequency_of("cpu")
    assert not control.available() and "share its CPUs" in control.why()


def test_clocks_that_another_process_sets_are_refused_until_it_is_done(sysfs):
    """The second would find the first one's setting, and would restore that."""
    first, second = (open_frequency("cpufreq", cpus, str(sysfs)) for cpus in ("0-1", "0-3"))
    first.set(1_000_000)
    before = children()
    with pytest.raises(FrequencyUnavailable, match="policy0 is being set by another process"):
        second.set(2_000_000)
    assert children() == before and policy(sysfs, 0, "max") == 1_000_000 and policy(sysfs, 2, "max") == 2_800_000
    first.restore()
    assert second.set(2_000_000).verified
    second.restore()
    assert [policy(sysfs, n, side) for n in (0, 2) for side in ("min", "max")] == [800_000, 2_800_000] * 2


def test_a_policy_that_is_gone_keeps_no_other_from_being_restored(sysfs):
    control = open_frequency("cpufreq", "0-3", str(sysfs))
    control.set(1_000_000)
    hidden = sysfs / "policy0"
    (sysfs / "devices/system/cpu/cpufreq/policy0").rename(hidden)  # its CPUs went offline
    with pytest.raises(FrequencyUnavailable, match="policy0"):
        control.restore()
    assert policy(sysfs, 2, "min") == 800_000 and policy(sysfs, 2, "max") == 2_800_000
    hidden.rename(sysfs / "devices/system/cpu/cpufreq/policy0")
    control.restore()
    assert policy(sysfs, 0, "min") == 800_000 and policy(sysfs, 0, "max") == 2_800_000


def test_cpus_without_a_common_frequency_have_no_axis(sysfs):
    for number, text in ((0, "1000000 2000000"), (2, "1500000 3000000")):
        (sysfs / f"devices/system/cpu/cpufreq/policy{number}/scaling_available_frequencies").write_text(text + "\n")
    control = open_frequency("cpufreq", "0-3", str(sysfs))
    assert not control.available() and "no frequency in common" in control.why()


# --- the guard -------------------------------------------------------------------


def test_a_guard_that_was_killed_is_replaced_and_restores_what_was_found_first(sysfs):
    before = children()
    control = open_frequency("cpufreq", "0-3", str(sysfs))
    control.set(1_000_000)
    (guard,) = children() - before
    os.kill(guard, signal.SIGKILL)
    until = time.monotonic() + 30
    while Path(f"/proc/{guard}/stat").read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.005)
    assert control.set(2_000_000).verified
    (second,) = children() - before
    assert second != guard
    control.restore()
    assert restored(sysfs) and children() == before


@pytest.fixture
def signals_kept():
    """A guard ignores signals for good; here it runs in the process of the tests."""
    ignored = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
    handlers = [signal.getsignal(number) for number in ignored]
    yield
    for number, handler in zip(ignored, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("kind", "found", "said"),
    [
        ("cpufreq", "800000", "another process set these clocks meanwhile"),
        ("no-such-kind", "", "no-such-kind"),
    ],
)
def test_a_guard_that_cannot_restore_what_was_found_says_why_and_ends(sysfs, signals_kept, capsys, kind, found, said):
    owner = os.pidfd_open(os.getpid())
    before = [policy(sysfs, number, name) for number in (0, 2) for name in ("min", "max")]
    guard(owner, kind, "0-3", str(sysfs), found)
    os.close(owner)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and said in lines[0]
    assert [policy(sysfs, number, name) for number in (0, 2) for name in ("min", "max")] == before


OWNER = """
import os, sys, time
from megatron.elastic.platform.frequency import NativeFrequency
control = NativeFrequency("cpufreq", "0-3", sys.argv[1])
control.set(1_000_000)
if sys.argv[2] == "fork":  # a data-loading child that outlives its parent holds copies of all descriptors
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
print("set", flush=True)
{ending}
"""

ENDINGS = {
    "waits to be killed": "time.sleep(60)",
    "forgets to restore": "pass",
    "raises": "raise SystemError('on purpose')",
    "exits at once": "os._exit(3)",
    "aborts": "os.abort()",
}


def owner_of(sysfs: Path, ending: str, mode: str = "plain") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER.format(ending=ENDINGS[ending]), str(sysfs), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def restored(sysfs: Path, within: float = 30.0) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until:
        if [policy(sysfs, n, side) for n in (0, 2) for side in ("min", "max")] == [800_000, 2_800_000] * 2:
            return True
        time.sleep(0.005)
    return False


@pytest.mark.parametrize("ending", ENDINGS)
def test_clocks_come_back_however_their_owner_ends(sysfs, ending):
    owner = owner_of(sysfs, ending)
    assert owner.stdout is not None and owner.stdout.readline() == "set\n"
    if ending == "waits to be killed":
        assert policy(sysfs, 0, "max") == 1_000_000
        owner.kill()
    assert restored(sysfs)
    _, said = owner.communicate(timeout=30)  # ends when the guard, which shares stderr, has ended too
    assert "clocks of cpufreq device 0-3 restored" in said


def test_a_signal_to_the_whole_job_does_not_reach_the_guard_first(sysfs):
    owner = owner_of(sysfs, "waits to be killed")
    assert owner.stdout is not None and owner.stdout.readline() == "set\n"
    guards = [int(pid) for pid in Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()]
    for one in guards:
        os.kill(one, signal.SIGTERM)
    time.sleep(0.05)
    assert policy(sysfs, 0, "max") == 1_000_000
    os.killpg(owner.pid, signal.SIGKILL)
    assert restored(sysfs)
    owner.communicate(timeout=30)


def test_children_that_outlive_the_owner_do_not_delay_the_guard(sysfs):
    owner = owner_of(sysfs, "waits to be killed", mode="fork")
    assert owner.stdout is not None and owner.stdout.readline() == "set\n"
    try:
        os.kill(owner.pid, signal.SIGKILL)
        assert restored(sysfs)
    finally:
        os.killpg(owner.pid, signal.SIGKILL)
        owner.communicate(timeout=30)


def test_a_gpu_is_unlocked_when_its_owner_is_killed(compiled, state):
    script = (
        "import sys, time\nfrom megatron.elastic.platform.frequency import NativeFrequency\n"
        "NativeFrequency('nvml', '0', sys.argv[1]).set(900_000)\nprint('set', flush=True)\ntime.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(compiled["nvml"])], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "set\n"
    assert state.read_text() == "900 1 0\n"
    owner.kill()
    until = time.monotonic() + 30
    while state.read_text() != "0 1 0\n" and time.monotonic() < until:
        time.sleep(0.005)
    assert state.read_text() == "0 1 0\n"
    owner.communicate(timeout=30)
