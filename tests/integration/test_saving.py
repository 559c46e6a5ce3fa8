"""Checkpoints are written while training goes on, and a save cut at any point never passes for a checkpoint.

Whatever a job left behind is resumed by plain Megatron's loader, with the losses of a
run that was never interrupted (dropout 0), from the newest checkpoint its tracker names.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from megatron.elastic.mcore.checkpoint.completeness import require_whole
from tests.integration.elastic_job import (
    MODEL,
    ROOT,
    JobResult,
    RunningJob,
    elastic_command,
    elastic_job,
    environment_of,
    largest_deviation,
)
from tests.integration.etcd_server import etcd_server
from tests.integration.launcher_cluster import is_alive
from tests.integration.ports import free_port
from tests.integration.test_cpu_layouts import logs, losses, run_jobs

QUIET = ("--hidden-dropout", "0", "--attention-dropout", "0", "--lr-decay-iters", "8")
STEPS, FIRST, CUT = 7, 2, 4
"""A checkpoint is complete at FIRST and every second step; CUT is the step whose save is cut."""
NAMING = ("save_whole", "save_named", "save_tracked")
"""Passed only by the rank that names and tracks a checkpoint."""
SAVE_POINTS = ("in_save", "save_writing", "save_finish", *NAMING)
VICTIMS = {"all": "", "first": "rank=0,", "last": "rank=1,"}
ROUNDING = 2e-6


def tracked(folder: Path) -> int:
    """The iteration that the tracker names, in a folder that has it whole and nothing else of that name."""
    iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
    kept = folder / f"iter_{iteration:07d}"
    assert (kept / "metadata.json").is_file() and (kept / ".metadata").is_file() and (kept / "common.pt").is_file()
    return iteration


def complete(folder: Path) -> list[int]:
    """Iterations whose folder has its name."""
    return sorted(int(p.name.removeprefix("iter_")) for p in folder.iterdir() if re.fullmatch(r"iter_\d{7}", p.name))


def save_and(folder: Path, fault: str) -> JobResult:
    return elastic_job(
        folder / "events",
        2,
        1,
        1,
        STEPS,
        *QUIET,
        "--save",
        str(folder / "saved"),
        "--save-interval",
        "2",
        "--no-elastic-respawn",
        "--elastic-allow-inject",
        "--elastic-inject",
        fault,
    )


def resumed(folder: Path, saved: dict[str, Path]) -> dict[str, dict[int, float]]:
    """Losses of plain Megatron, one rank, going on from each of these."""
    jobs = [
        {
            "name": name,
            "world": 1,
            "seconds": 120,
            "arguments": [
                *MODEL,
                *QUIET,
                "--train-iters",
                str(tracked(path) + 4),
                "--load",
                str(path),
                "--exit-on-missing-checkpoint",
                "--override-opt-param-scheduler",
            ],
        }
        for name, path in saved.items()
    ]
    codes = run_jobs(folder, jobs)
    assert all(ranks == [0] for ranks in codes.values()), (codes, [logs(folder, name)[-2000:] for name in codes])
    return {name: losses(logs(folder, name)) for name in saved}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of plain Megatron, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = [*MODEL, *QUIET, "--train-iters", str(STEPS + 4), "--override-opt-param-scheduler"]
    run_jobs(folder, [{"name": "whole", "world": 1, "seconds": 120, "arguments": arguments}])
    return losses(logs(folder, "whole"))


def check_resumed(whole: dict[int, float], later: dict[int, float], iteration: int) -> None:
    # Megatron's second line after a start averages two steps.
    expected = {step: loss for step, loss in whole.items() if iteration + 3 <= step <= iteration + 4}
    assert len(expected) == 2 and largest_deviation(expected, later) < ROUNDING


def check_cut(folder: Path, point: str, victim: str) -> None:
    result = save_and(folder, f"kill:{VICTIMS[victim]}step={CUT},point={point}")
    assert "Traceback" not in result.output, result.output[-4000:]
    lost = {record.fields["lost_rank"] for record in result.of("loss")}
    if victim == "all" and result.code == 4:
        assert tracked(folder / "saved") == FIRST and complete(folder / "saved") == [FIRST]
        return
    # One rank died there, perhaps because its death kept the other from getting there.
    assert result.code == 0, result.output[-4000:]
    assert len(lost) == 1 and (victim == "all" or lost == {0 if victim == "first" else 1})
    assert tracked(folder / "saved") == STEPS, "begun again, and the job saved its end"


@pytest.mark.slow
def test_steps_go_on_while_a_checkpoint_is_written(tmp_path: Path, whole: dict[int, float]) -> None:
    """The writing thread is held for longer than a step; what it writes is of the step at which it was begun."""
    result = save_and(tmp_path, f"delay:step={CUT},point=save_writing,seconds=2")
    assert result.code == 0, result.output[-4000:]
    text = result.output
    begun, step = text.index(f"saving checkpoint at iteration {CUT:7d}"), re.search(rf"iteration +{CUT + 1}/", text)
    done = text.index(f"successfully saved checkpoint from iteration {CUT:7d}")
    assert step is not None and begun < step.start() < done, "the next step was over before the checkpoint was"
    shutil.copytree(tmp_path / "saved", tmp_path / "copy")
    (tmp_path / "copy/latest_checkpointed_iteration.txt").write_text(str(CUT))
    later = resumed(tmp_path, {"resumed": tmp_path / "copy"})["resumed"]
    check_resumed(whole, later, CUT)


@pytest.mark.slow
def test_a_loss_while_a_checkpoint_is_written_has_it_begun_again(tmp_path: Path, whole: dict[int, float]) -> None:
    fault = f"delay:step={CUT},point=save_writing,seconds=3;kill:rank=1,step={CUT + 1},point=mid_forward"
    result = save_and(tmp_path, fault)
    assert result.code == 0, result.output[-4000:]
    assert f"successfully saved checkpoint from iteration {CUT:7d}" not in result.output
    assert f"successfully saved checkpoint from iteration {CUT + 1:7d}" in result.output
    assert not list((tmp_path / "saved").glob("*.partial*"))
    check_resumed(whole, resumed(tmp_path, {"resumed": tmp_path / "saved"})["resumed"], tracked(tmp_path / "saved"))


@pytest.mark.slow
def test_a_rank_whose_disk_is_slow_is_not_lost_with_another(tmp_path: Path) -> None:
    """Others begin a generation while it waits for its disk, for longer than a rank may be silent (3 s here)."""
    faults = "delay:rank=1,step=3,point=save_writing,seconds=8;kill:rank=2,step=3,point=save_finish"
    flags = ["--save", str(tmp_path / "saved"), "--save-interval", "1", "--elastic-detection-timeout", "0.1"]
    flags += ["--no-elastic-respawn", "--elastic-allow-inject", "--elastic-inject", faults]
    result = elastic_job(tmp_path / "events", 4, 1, 1, STEPS, *QUIET, *flags)
    assert result.code == 0, result.output[-4000:]
    assert {record.fields["lost_rank"] for record in result.of("loss")} == {2}
    assert tracked(tmp_path / "saved") == STEPS


def test_a_save_that_a_loss_made_void_leaves_nothing_in_the_next(tmp_path: Path) -> None:
    """All of its files were written; those of the next one, by a rank less, have other parts in them."""
    saved = tmp_path / "saved"
    flags = ("--save", str(saved), "--save-interval", "2", "--no-elastic-respawn", "--elastic-allow-inject")
    faults = "delay:step=3,point=mid_forward,seconds=1;kill:rank=3,step=3,point=mid_update"
    result = elastic_job(tmp_path / "events", 4, 1, 1, 6, *QUIET, *flags, "--elastic-inject", faults)
    assert result.code == 0 and "could not be written" not in result.output, result.output[-4000:]
    assert not (saved / "iter_0000002").exists(), "void"
    assert len(complete(saved)) >= 2
    for step in complete(saved):
        require_whole(saved / f"iter_{step:07d}")


def test_the_checkpoint_before_stays_until_the_next_has_its_name(tmp_path: Path) -> None:
    """With --save-retain-interval it is removed afterwards; a job that ends in between can go on from it."""
    saved = tmp_path / "saved"
    flags = ("--save", str(saved), "--save-interval", "2", "--save-retain-interval", "100")
    fault = ("--no-elastic-respawn", "--elastic-allow-inject", "--elastic-inject", f"kill:step={CUT},point=save_whole")
    cut = elastic_job(tmp_path / "events", 1, 1, 1, STEPS, *QUIET, *flags, *fault)
    assert cut.code == 4, cut.output[-4000:]
    assert tracked(saved) == FIRST and complete(saved) == [FIRST]
    whole = elastic_job(tmp_path / "again", 1, 1, 1, STEPS, *QUIET, *flags, "--load", str(saved))
    assert whole.code == 0 and min(whole.committed) == FIRST + 1, whole.output[-4000:]
    assert tracked(saved) == STEPS and complete(saved) == [STEPS] and len(list(saved.iterdir())) == 2


@pytest.mark.slow
def test_a_loss_while_ranks_tell_how_long_a_save_took_costs_no_step(tmp_path: Path, whole: dict[int, float]) -> None:
    """Megatron gathers that beside the save: whoever waited in it for the dead ended the job."""
    job = elastic_job(
        tmp_path / "events",
        2,
        1,
        1,
        STEPS,
        *QUIET,
        "--save",
        str(tmp_path / "saved"),
        "--save-interval",
        "2",
        "--no-elastic-respawn",
        script=ROOT / "tests/integration/lost_in_timers.py",
        environment={"LOST_RANK": "0"},
    )
    assert job.code == 0, job.output[-3000:]
    assert len(job.of("loss")) == 1
    assert re.search(r"recovered at generation 2 .*: step 4 between steps, 0 steps lost", job.output)
    assert set(job.committed) == set(range(1, STEPS + 1))
    assert largest_deviation({step: whole[step] for step in range(CUT, STEPS + 1)}, job.committed) < ROUNDING
    assert {2, CUT + 1, 6} <= set(complete(tmp_path / "saved")), "the save that was under way is begun again"


@pytest.mark.slow
def test_a_save_cut_anywhere_is_no_checkpoint(tmp_path: Path, whole: dict[int, float]) -> None:
    """Every point of a save × the death of all ranks, of the one that names the checkpoint, of another."""
    left = {}
    for point in SAVE_POINTS:
        for victim in VICTIMS if point not in NAMING else ("first",):
            folder = tmp_path / f"{point}-{victim}"
            check_cut(folder, point, victim)
            left[folder.name] = folder / "saved"
    for name, later in resumed(tmp_path, left).items():
        check_resumed(whole, later, tracked(left[name]))


@pytest.mark.slow
def test_who_was_stopped_while_naming_a_checkpoint_touches_nothing_when_it_wakes_up(
    tmp_path: Path, whole: dict[int, float]
) -> None:
    """A node stops between the last file and the rename; the other one goes on, and is saving again as it wakes up."""
    saved = tmp_path / "saved"
    plain = elastic_command(
        tmp_path / "events",
        1,
        1,
        1,
        STEPS,
        *QUIET,
        "--save",
        str(saved),
        "--save-interval",
        "2",
        "--no-elastic-background-save",
        "--no-elastic-respawn",
        "--elastic-detection-timeout",
        "0.5",
        "--elastic-allow-inject",
        "--elastic-inject",
        f"delay:rank=1,step={CUT},point=save_writing,nth=2,seconds=8",
        script=ROOT / "tests/integration/stopped_while_naming.py",
    )
    at = plain.index("--nproc-per-node")
    environment = environment_of({"STOPPED_RANK": "0"})

    def node(number: int, endpoint: str) -> RunningJob:
        store = ("--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint, "--rdzv-id", "naming")
        where = ("--nnodes", "2", "--node-rank", str(number), "--master-port", str(port), *store)
        return RunningJob(tmp_path / "events", [*plain[:at], *where, *plain[at:]], environ=environment, named=False)

    port = free_port()
    with etcd_server(tmp_path) as server, node(0, server.endpoint) as first, node(1, server.endpoint) as second:
        stopped = int(first.wait_for(r"node of process (\d+) stops").group(1))
        gone = second.wait_for(r"recovered at generation").end()
        second.wait_for(rf"scheduled an async checkpoint save at iteration +{CUT}", gone)
        os.kill(stopped, signal.SIGCONT)
        ended = time.monotonic() + 30
        while is_alive(stopped) and time.monotonic() < ended:
            time.sleep(0.05)
        assert not is_alive(stopped), "it ends when it finds its lease over"
        assert complete(saved) == [FIRST] and tracked(saved) == FIRST, "what the other one was writing is untouched"
        first.launcher.kill()
        result = second.finish()
    assert result.code == 0, result.output[-4000:]
    assert complete(saved) == [2, 4, 6, 7] and tracked(saved) == STEPS
    assert not list(saved.glob("*.partial*")) and not list(saved.glob("*.new"))
    assert largest_deviation({step: whole[step] for step in range(3, STEPS + 1)}, result.committed) < ROUNDING


@pytest.mark.slow
def test_a_tensor_parallel_group_that_lost_a_member_saves_its_cuts(tmp_path: Path) -> None:
    """The other member goes on alone, or is parked: every parameter is whole in the checkpoint."""
    # Not as the module's: Megatron's initial weights are others with TP 2.
    whole, left = elastic_job(tmp_path / "whole", 4, 2, 1, STEPS + 4, *QUIET, "--override-opt-param-scheduler"), {}
    assert whole.code == 0, whole.output[-4000:]
    for rank, tensor in ((0, "live-on"), (0, "park"), (3, "live-on"), (3, "park")):
        folder = tmp_path / f"without-{rank}-{tensor}"
        result = elastic_job(
            folder / "events",
            4,
            2,
            1,
            STEPS,
            *QUIET,
            "--elastic-tensor",
            tensor,
            "--save",
            str(folder / "saved"),
            "--save-interval",
            "4",
            "--no-elastic-respawn",
            "--elastic-allow-inject",
            "--elastic-inject",
            f"kill:rank={rank},step=2",
        )
        assert result.code == 0, result.output[-4000:]
        assert tracked(folder / "saved") == STEPS and "could not be written" not in result.output
        left[folder.name] = folder / "saved"
    for later in resumed(tmp_path, left).values():
        check_resumed(whole.losses, later, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_launcher_killed_at_any_moment_leaves_a_checkpoint_to_go_on_from(
    tmp_path: Path, whole: dict[int, float], seed: int
) -> None:
    """Saving at every step, so that most moments are moments of a save."""
    moment = random.Random(seed).uniform(0.0, 2.0)
    print(f"seed {seed}: killed {moment:.2f} s after the first checkpoint")
    saved = tmp_path / "saved"
    command = elastic_command(
        tmp_path / "events",
        2,
        1,
        1,
        STEPS,
        *QUIET,
        "--save",
        str(saved),
        "--save-interval",
        "1",
        "--elastic-allow-inject",
        "--elastic-inject",
        "delay:count=0,point=save_finish,seconds=0.1",
    )
    with RunningJob(tmp_path / "events", command) as job:
        job.wait_for("successfully saved checkpoint")
        time.sleep(moment)
        job.launcher.kill()
        job.finish()
    check_resumed(whole, resumed(tmp_path, {"resumed": saved})["resumed"], tracked(saved))


@pytest.mark.slow
def test_the_first_rank_back_from_a_loss_saves_the_counts_of_the_job(tmp_path: Path) -> None:
    """It writes what is common to all: steps, operations, arguments, as if it had been there from the start."""
    common, steps = {}, 150
    for name, faults in {"whole": "", "back": "kill:rank=0,step=3,point=mid_forward"}.items():
        folder = tmp_path / name
        result = elastic_job(
            folder / "events",
            2,
            1,
            1,
            steps,
            *QUIET,
            "--save",
            str(folder / "saved"),
            "--save-interval",
            "1000",
            "--elastic-allow-inject",
            "--elastic-inject",
            faults,
        )
        assert result.code == 0, result.output[-4000:]
        assert [record.fields["joined"] for record in result.of("generation") if record.fields["reason"] == "join"] == (
            [[0]] if faults else []
        )
        saved = torch.load(folder / f"saved/iter_{steps:07d}/common.pt", weights_only=False)
        arguments = {k: v for k, v in vars(saved["args"]).items() if k not in ("save", "elastic_inject")}
        counts = {key: saved[key] for key in ("iteration", "num_floating_point_operations_so_far")}
        common[name] = {**arguments, **counts, "elastic_event_log": ""}
    assert common["back"] == common["whole"]


def can_mount() -> bool:
    """Return whether a mount namespace with a file system of its own may be made here."""
    return (
        subprocess.run(
            ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"], capture_output=True, check=False
        ).returncode
        == 0
    )


@pytest.mark.skipif(not can_mount(), reason="unshare --mount and mount need more rights than this user has")
def test_a_full_disk_costs_a_line_and_not_the_training(tmp_path: Path) -> None:
    """The first checkpoint fits, the second does not: it is not there, the first is, and the exit status tells."""
    saved = tmp_path / "saved"
    saved.mkdir()
    (tmp_path / "seen").mkdir()
    command = elastic_command(tmp_path / "events", 2, 1, 1, STEPS, *QUIET, "--save", str(saved), "--save-interval", "2")
    inside = (
        f"mount -t tmpfs -o size=1600k none {saved} && {shlex.join(command)}; code=$?; "
        f"cp -r {saved}/. {tmp_path / 'seen'}; exit $code"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", inside],
        env=environment_of(),
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 4, done.stdout[-4000:]
    assert "Traceback" not in done.stdout
    failed = [line for line in done.stdout.splitlines() if "could not be written" in line]
    assert failed and all("No space left on device" in line and "--save" in line for line in failed)
    assert re.search(rf"iteration +{STEPS}/", done.stdout), "training went on to its end"
    assert complete(tmp_path / "seen") == [FIRST] and tracked(tmp_path / "seen") == FIRST
    assert "the last checkpoint could not be saved" in done.stdout
    assert not list((tmp_path / "seen").glob("*.partial*")), "nothing half-written is left"


@pytest.mark.slow
def test_a_folder_that_is_gone_costs_a_line_and_not_the_training(tmp_path: Path) -> None:
    """It could be written to at the start; from step 1 on there is a file in its place."""
    saved, slow = tmp_path / "saved", ("--elastic-allow-inject", "--elastic-inject", "delay:step=2,seconds=3")
    command = elastic_command(
        tmp_path / "events", 2, 1, 1, 3, *QUIET, *slow, "--save", str(saved), "--save-interval", "2"
    )
    with RunningJob(tmp_path / "events", command) as job:
        job.wait_for("iteration +1/")
        shutil.rmtree(saved, ignore_errors=True)
        saved.write_text("in the way")
        result = job.finish()
    assert result.code == 4, result.output[-4000:]
    assert "could not be written" in result.output and "Traceback" not in result.output
    assert max(result.committed) == 3


@pytest.mark.slow
def test_a_loss_in_a_non_persistent_save_does_not_keep_the_next_from_being_written(tmp_path: Path) -> None:
    """Megatron reads a number in the name of each folder beside it; that of a void save has none."""
    saved = tmp_path / "saved"
    often = ("--non-persistent-save-interval", "2", "--non-persistent-ckpt-type", "global", "--save-interval", "100")
    fault = (
        "--no-elastic-respawn",
        "--elastic-allow-inject",
        "--elastic-inject",
        f"kill:rank=1,step={CUT},point=save_writing",
    )
    result = elastic_job(tmp_path / "events", 2, 1, 1, STEPS, *QUIET, "--save", str(saved), *often, *fault)
    assert result.code == 0 and "could not be written" not in result.output, result.output[-4000:]
    assert max(complete(saved / "non_persistent")) == 6
