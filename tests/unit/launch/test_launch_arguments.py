"""The command line: torchrun's, ours, Slurm's and Kubernetes'."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from megatron.elastic.config import ConfigError, ElasticConfig, flag_name, plain_type
from megatron.elastic.control import env
from megatron.elastic.launch.arguments import BadCommand, build_parser, parse
from megatron.elastic.launch.cluster import derive, first_host
from megatron.elastic.launch.settings import elastic_settings

SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_JOB_NODELIST": "gpu[003-006]",
}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def test_torchruns_own_options_are_all_there() -> None:
    from torch.distributed.run import get_args_parser

    theirs = {option for action in get_args_parser()._actions for option in action.option_strings}
    ours = {option for action in build_parser()._actions for option in action.option_strings}
    assert theirs <= ours
    assert ours - theirs == {"--adapt", "--respawn", "--no-respawn", "--preload"}


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [([], 50), (["--no-elastic-respawn"], 0), (["--no-elastic-respawn", "--elastic-migrate-after", "6"], 6)],
)
def test_layers_wait_for_a_lost_rank_only_where_it_returns(script: str, arguments: list[str], steps: int) -> None:
    assert parse([script, *arguments], {}).settings.steps_before_migration == steps


def test_script_arguments_are_passed_on_untouched(script: str) -> None:
    arguments = ["--elastic", "--elastic-detection-timeout", "0.5", "--nnodes", "9", "--no-elastic-respawn"]
    job = parse(["--nproc-per-node", "3", script, *arguments], {})
    assert job.arguments == tuple(arguments)
    assert (job.workers, job.nodes, job.node, job.elastic) == (3, 1, 0, True)
    assert job.settings == ElasticConfig(detection_timeout=0.5, respawn=False)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--exit-signal-handler", "--exit-signal", "SIGUSR1"], "SIGUSR1"),
        (["--exit-signal=SIGUSR1", "--exit_signal_handler"], "SIGUSR1"),
        (["--exit-signal-handler", "--exit-signal", "SIGUSR1", "--exit-signal", "SIGUSR2"], "SIGUSR2"),
        (["--exit-signal", "SIGUSR1"], ""),
        (["--exit-signal-handler"], ""),
        (["--exit-signal-handler", "--exit-signal"], ""),
    ],
)
def test_megatrons_exit_signal_drains_the_job_as_well(script: str, arguments: list[str], name: str) -> None:
    usual = parse([script, "--elastic"], {}).signals
    assert "SIGTERM" in usual
    assert parse([script, "--elastic", *arguments], {}).signals == (*usual, *filter(None, [name]))
    assert parse([script, *arguments], {}).signals == usual, "another program handles its signals itself"


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [([], 0.0), (["--distributed-timeout-minutes", "90"], 5400.0), (["--distributed_timeout_minutes=5"], 300.0)],
)
def test_a_script_says_how_long_its_set_up_may_take(script: str, arguments: list[str], seconds: float) -> None:
    assert parse([script, "--elastic", *arguments], {}).setup_seconds == seconds
    with pytest.raises(BadCommand, match="--distributed-timeout-minutes takes an integer above 0, got 'x'"):
        parse([script, "--elastic", "--distributed-timeout-minutes", "x"], {})


@pytest.mark.parametrize("name", ["SIGNOTHING", "SIGKILL"])
def test_an_exit_signal_that_cannot_be_handled_is_refused(script: str, name: str) -> None:
    with pytest.raises(BadCommand, match="--exit-signal takes names of signals that can be handled"):
        parse([script, "--elastic", "--exit-signal-handler", "--exit-signal", name], {})


def test_a_script_is_elastic_only_with_its_flag(script: str) -> None:
    """Else plain Megatron's own rendezvous would find its port taken by the elastic store."""
    assert not parse(["--adapt", script], {}).elastic
    assert parse(["--adapt", script, "--elastic"], {}).elastic


def test_no_folder_is_made_before_there_is_something_to_log(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    assert parse([script], {}).logs is None
    files = parse(["--tee", "3", script], {}).logs
    assert files is not None and files.folder is None
    assert not list((tmp_path / "t").iterdir())


def test_the_launchers_own_respawn_switch_wins(script: str) -> None:
    assert parse(["--respawn", script, "--no-elastic-respawn"], {}).settings.respawn
    assert not parse(["--no-respawn", script], {}).settings.respawn


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--elastic-max-losses-per-hour=5"], ElasticConfig(max_losses_per_hour=5)),
        (["--elastic_max_losses_per_hour", "5"], ElasticConfig(max_losses_per_hour=5)),
        (["--elastic-no-respawn"], ElasticConfig(respawn=False)),
        (["--elastic-migrate-after", "6"], ElasticConfig(migrate_after=6)),
        (["--elastic-respawn", "false"], ElasticConfig(respawn=False)),
        (["--elastic-respawn", "--lr", "1"], ElasticConfig()),
        (["--elastic-unknown", "x", "--lr", "5"], ElasticConfig()),
    ],
)
def test_elastic_flags_are_read_in_every_usual_spelling(arguments: list[str], expected: ElasticConfig) -> None:
    assert elastic_settings(arguments) == expected


def test_a_wrong_value_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="--elastic-detection-timeout"):
        elastic_settings(["--elastic-detection-timeout", "soon"])


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        *((["--nnodes", text, "S"], "--nnodes takes .*got '") for text in ("0", "3:2", "0:2", "1:2:3", "x", "", "2:")),
        (["--rdzv-conf", "join_timeout", "S"], "--rdzv-conf takes KEY=VALUE"),
        (["--nnodes", "2", "--node-rank", "2", "S"], "--node-rank"),
        (["--nproc-per-node", "0", "S"], "--nproc-per-node"),
        (["--nproc-per-node", "many", "S"], "--nproc-per-node many"),
        (["--rdzv-backend", "zookeeper", "S"], "--rdzv-backend"),
        (["--rdzv-backend", "etcd", "S"], "--rdzv-endpoint"),
        (["--rdzv-backend", "etcd", "--rdzv-endpoint", "e:2379", "S"], "--rdzv-id"),
        (["--local-ranks-filter", "a", "S"], "--local-ranks-filter"),
        (["--no-python", "-m", "S"], "--no-python"),
        (["/nowhere/train.py"], "training_script"),
        (["--shutdown-timeout=-1", "S"], "--shutdown-timeout"),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag(argv: list[str], flag: str, script: str) -> None:
    with pytest.raises(BadCommand, match=flag) as caught:
        parse([script if item == "S" else item for item in argv], {})
    assert "\n" not in str(caught.value)


NO_NUMBERS = ("nan", "-nan", "inf", "-inf", "1e999", "", "many")
PORTS = ("0", "-1", "99999999999")
SECONDS = ("nan", "inf", "-inf", "1e999", "0", "-1", "soon")
NUMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mirrors": (("-1", "1.5"), ("0", "2")),
    "scatter_width": (("-1", "0"), ("1",)),
    "block_bytes": (("-64", "0", "1000", "1090"), ("1024",)),
    "bucket_elements": (("-1", "0"), ("1",)),
    "detection_timeout": (("-1", "0", "-0", "1e-9", "1e9"), ("0.01", "1", "3600")),
    "max_losses_per_hour": (("-1",), ("0", "1")),
    "quarantine_after": (("-1",), ("0", "1")),
    "migrate_after": (("-2",), ("-1", "0", "1")),
    "expert_replicas": (("-1", "0"), ("1",)),
    "mean_time_between_losses": (("-1", "0", "-0", "1e300"), ("0.5", "1e9")),
    "spares": (("-1",), ("0", "1")),
    "verify_interval": (("-1",), ("0", "1")),
}
"""Numeric setting → values that are refused beside :data:`NO_NUMBERS`, and values that are accepted."""


def test_the_table_has_every_numeric_setting() -> None:
    hints = {name: plain_type(hint) for name, hint in get_type_hints(ElasticConfig).items()}
    assert [name for name, hint in hints.items() if hint in (int, float)] == list(NUMBERS)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_cannot_be_is_one_line_that_names_the_flag(name: str, script: str) -> None:
    flag = flag_name(name)
    refused, accepted = NUMBERS[name]
    for text in (*NO_NUMBERS, *refused):
        with pytest.raises(BadCommand, match=rf"^{flag} .*(must|takes)") as caught:
            parse([script, "--elastic", f"{flag}={text}"], {})
        assert "\n" not in str(caught.value), text
    for text in accepted:
        assert getattr(parse([script, f"{flag}={text}"], {}).settings, name) == float(text)


@pytest.mark.parametrize(
    ("words", "refused", "accepted", "named"),
    [
        ("--rdzv-conf join_timeout={}", SECONDS, "0.5", "--rdzv-conf join_timeout takes seconds"),
        ("--rdzv-conf timeout={}", SECONDS, "600", "--rdzv-conf timeout takes seconds"),
        ("--nnodes 2 --master-port={}", PORTS, "65535", r"--master-port .* takes a port"),
        ("--nnodes 2 --rdzv-endpoint=h:{}", ("0", "65536"), "65535", r"\(--rdzv-endpoint\) takes a port"),
        ("--rdzv-id j --rdzv-backend etcd --rdzv-endpoint=e:{}", PORTS, "2379", "--rdzv-endpoint takes"),
    ],
)
def test_a_number_of_the_rendezvous_that_cannot_be_is_refused(
    words: str, refused: tuple[str, ...], accepted: str, named: str, script: str
) -> None:
    given = {env.SECRET: "f" * 32}
    for text in refused:
        with pytest.raises(BadCommand, match=named) as caught:
            parse([*words.format(text).split(), script], given)
        assert "\n" not in str(caught.value)
    parse([*words.format(accepted).split(), script], given)


def test_srun_tells_node_count_rank_and_master(script: str) -> None:
    place = derive(build_parser().parse_args([script]), SRUN)
    assert (place.node, place.nodes, place.master_addr, place.run_id) == (2, 4, "gpu003", "slurm-77-0")
    same = derive(build_parser().parse_args([script]), {**SRUN, "SLURM_PROCID": "3"})
    assert same.master_port == place.master_port and 1024 < place.master_port < 65536


def test_variables_of_a_scheduler_that_are_empty_count_as_unset_and_others_are_named(script: str) -> None:
    args, pod = build_parser().parse_args([script]), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    several = build_parser().parse_args(["--nnodes", "4", script])
    assert derive(args, dict.fromkeys(SRUN, "")).nodes == 1
    assert derive(several, {**pod, "JOB_COMPLETION_INDEX": "", "HOSTNAME": "trainer-2"}).node == 2
    with pytest.raises(ValueError, match=r"SLURM_PROCID='two' of the environment is no number: unset it"):
        derive(args, {**SRUN, "SLURM_PROCID": "two"})
    with pytest.raises(ValueError, match=r"JOB_COMPLETION_INDEX='x' of the environment is no number"):
        derive(several, {**pod, "JOB_COMPLETION_INDEX": "x"})
    unlisted = {name: value for name, value in SRUN.items() if "NODELIST" not in name}
    with pytest.raises(ValueError, match=r"cannot read the Slurm node list '': give --master-addr"):
        derive(args, unlisted)


def test_flags_win_over_slurm(script: str) -> None:
    argv = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "here", "--master-port", "5", script]
    place = derive(build_parser().parse_args(argv), SRUN)
    assert (place.node, place.nodes, place.master_addr, place.master_port) == (1, 2, "here", 5)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("gpu[003-007,12],cpu1", "gpu003"),
        ("a-b[1,3]", "a-b1"),
        ("x1.y,x2.y", "x1.y"),
        ("r[1-2]-ib", "r1-ib"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_kubernetes_index_from_an_indexed_job_or_a_stateful_pod(script: str) -> None:
    args = build_parser().parse_args(["--nnodes", "4", "--master-addr", "m", script])
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert derive(args, {**pod, "JOB_COMPLETION_INDEX": "3"}).node == 3
    assert derive(args, {**pod, "HOSTNAME": "trainer-2"}).node == 2


def test_c10d_leaves_the_node_number_to_the_rendezvous(script: str) -> None:
    argv = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "[::1]:99", script]
    place = derive(build_parser().parse_args(argv), {})
    assert (place.node, place.master_addr, place.master_port) == (None, "::1", 99)


@pytest.mark.parametrize("given", ["[fd00::2]", "fd00::2"])
def test_an_ipv6_address_may_stand_in_brackets(script: str, given: str) -> None:
    argv = ["--nnodes", "2", "--master-addr", given, "--local-addr", given, script]
    job = parse(argv, {env.SECRET: "ab" * 16})
    assert (job.master_addr, job.local_addr) == ("fd00::2", "fd00::2")


def test_options_of_the_rendezvous_that_are_not_read_are_named(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    parse(["--rdzv-conf", "join_timeout=9,last_call_timeout=3", script], {})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("ignored: --rdzv-conf last_call_timeout")


def test_standalone_takes_any_port(script: str) -> None:
    assert parse(["--standalone", script], {}).master_port == 0
    assert parse([script], {}).master_port == 0
    assert parse(["--nnodes", "2", script], {env.SECRET: "ab" * 16}).master_port == 29500


@pytest.mark.parametrize("below", ["", "logs"])
def test_a_log_folder_that_is_a_file_is_one_line_that_names_the_flag_and_the_fix(
    script: str, tmp_path: Path, below: str
) -> None:
    (tmp_path / "taken").write_text("mine")
    place = tmp_path / "taken" / below
    with pytest.raises(BadCommand) as refused:
        parse(["--log-dir", str(place), script], {})
    assert str(refused.value) == f"--log-dir {place} is a file or lies below one: name a folder"
    assert (tmp_path / "taken").read_text() == "mine" and {path.name for path in tmp_path.iterdir()} == {
        "taken",
        "train.py",
    }


def test_a_log_folder_that_is_a_file_ends_the_launcher(script: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    command = [sys.executable, "-m", "megatron.elastic.launch", "--log-dir", str(tmp_path / "taken"), script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"error: --log-dir {tmp_path / 'taken'} is a file or lies below one: name a folder\n"
