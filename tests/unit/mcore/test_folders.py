"""Folders that cannot serve are found before training, and looking leaves nothing behind."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron.elastic.control import env
from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.args.folders import check_folders, why_not_writable


def folders(**given: Any) -> Namespace:
    names = ("save", "load", "tensorboard_dir", "pretrained_checkpoint", "elastic_event_log", "data_cache_path")
    more = {"elastic": True, "rank": 0, "mock_data": False, "ckpt_step": None, "exit_on_missing_checkpoint": False}
    return Namespace(**{**dict.fromkeys(names), **more, **given})


def tracked(folder: Path, text: str, *numbers: int) -> str:
    for number in numbers:
        (folder / f"iter_{number:07d}").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(text)
    return str(folder)


def test_folders_that_are_there_or_can_be_made_pass_and_nothing_is_made(tmp_path: Path) -> None:
    there, to_be = str(tmp_path), str(tmp_path / "a/b")
    check_folders(folders(save=there, tensorboard_dir=to_be, elastic_event_log=there), {})
    assert list(tmp_path.iterdir()) == []


def test_every_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput) as caught:
        check_folders(
            folders(save="/proc/x", tensorboard_dir=str(tmp_path / "file"), elastic_event_log=str(tmp_path / "file/x")),
            {},
        )
    assert [text.split()[0] for text in caught.value.texts] == ["--save", "--tensorboard-dir", "--elastic-event-log"]


def test_a_link_to_nowhere_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert "is not a folder" in why_not_writable(tmp_path / "link")


@pytest.mark.parametrize("text", ["0", "17", " 17\n", "release"])
def test_a_tracker_file_that_names_a_checkpoint_passes(tmp_path: Path, text: str) -> None:
    check_folders(folders(load=tracked(tmp_path, text, 0, 17)), {})


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, False),  # step 4 is loaded instead
        ({"elastic": False}, True),
        ({"ckpt_step": 4}, False),
        ({"ckpt_step": 30}, False),
        ({"ckpt_step": 5}, True),
        ({"ckpt_step": 5, "elastic": False}, True),
    ],
)
def test_a_checkpoint_that_is_not_there_is_refused_unless_an_older_one_is_taken(
    tmp_path: Path, given: dict[str, Any], refused: bool
) -> None:
    args = folders(load=tracked(tmp_path, "17", 4, 30), **given)
    if not refused:
        check_folders(args, {})
        return
    step = f"--ckpt-step {args.ckpt_step}" if args.ckpt_step else "latest_checkpointed_iteration.txt names step 17"
    with pytest.raises(BadInput, match=rf"--load .*: {step}, which is not there \(there are: 30, 4\)"):
        check_folders(args, {})


def test_a_tracker_file_with_newer_checkpoints_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="names step 17, which is not there"):
        check_folders(folders(load=tracked(tmp_path, "17", 30)), {})


def test_a_missing_checkpoint_that_is_asked_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--exit-on-missing-checkpoint asks for one"):
        check_folders(folders(load=str(tmp_path), exit_on_missing_checkpoint=True), {})


def test_indices_of_the_data_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    beside = folders(data_path=["/proc/data"])
    with pytest.raises(BadInput, match=r"--data-path /proc/data: indices .* give --data-cache-path"):
        check_folders(beside, {})
    with pytest.raises(BadInput, match="--data-cache-path /proc/x cannot be made"):
        check_folders(folders(data_path=["/proc/data"], data_cache_path="/proc/x"), {})
    check_folders(folders(data_path=["/proc/data"], data_cache_path=str(tmp_path / "to/be")), {})
    check_folders(folders(data_path=["/proc/data"], rank=1), {})
    check_folders(folders(data_path=["/proc/data"], mock_data=True), {})


@pytest.mark.parametrize("text", ["abc", "", "-3", "1.5", "17\n18"])
def test_one_that_does_not_is_refused_with_what_is_there(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput, match=r"--load .*there are: 30, 4"):
        check_folders(folders(load=tracked(tmp_path, text, 4, 30)), {})


def test_no_tracker_file_is_the_beginning_of_a_run(tmp_path: Path) -> None:
    check_folders(folders(load=str(tmp_path)), {})


@pytest.mark.parametrize("environ", [{env.NEWCOMER: "1"}, {env.INCARNATION: "2"}])
def test_a_rank_that_joins_a_running_job_is_let_in_whatever_became_of_its_folders(environ: dict[str, str]) -> None:
    """A disk that fills up costs a line and a checkpoint, not the ranks that come back meanwhile."""
    check_folders(folders(save="/proc/x"), environ)


def test_a_non_persistent_checkpoint_is_one_for_exit_on_missing_checkpoint(tmp_path: Path) -> None:
    asks = {"load": str(tmp_path), "exit_on_missing_checkpoint": True}
    tracked_beside = {"non_persistent_ckpt_type": "global", "non_persistent_global_ckpt_dir": str(tmp_path / "beside")}
    with pytest.raises(BadInput, match="--exit-on-missing-checkpoint asks for one"):
        check_folders(folders(**asks, **tracked_beside), {})
    tracked(tmp_path / "beside", "6", 6)
    check_folders(folders(**asks, **tracked_beside), {})


def test_the_folder_of_non_persistent_checkpoints_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--non-persistent-global-ckpt-dir /proc/x cannot be written to"):
        check_folders(folders(save=str(tmp_path), non_persistent_global_ckpt_dir="/proc/x"), {})
