"""A checkpoint that --save-retain-interval does not keep goes once the next one is there, and no earlier."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.elastic.mcore.checkpoint.retention import discard, nothing_removed, save_folders


def checkpoint(save: Path, step: int) -> Path:
    folder = save / f"iter_{step:07d}"
    folder.mkdir()
    (folder / "content").write_text(str(step))
    return folder


def settled() -> None:
    """Wait for the threads that remove."""
    for thread in threading.enumerate():
        if thread.name == "elastic-remove":
            thread.join()


@pytest.mark.parametrize(
    ("interval", "before", "saved", "kept"),
    [(None, 2, 4, True), (10, 2, 4, False), (2, 2, 4, True), (10, 4, 4, True), (10, 0, 4, True)],
)
def test_only_the_one_before_goes_and_only_beside_the_interval(
    tmp_path: Path, interval: int | None, before: int, saved: int, kept: bool
) -> None:
    other, folder = checkpoint(tmp_path, 1), checkpoint(tmp_path, before)
    discard(SimpleNamespace(save=f"{tmp_path}/", save_retain_interval=interval), str(tmp_path), before, saved)
    settled()
    assert folder.exists() == kept and other.exists()
    assert len(list(tmp_path.iterdir())) == 1 + kept, "nothing is left under another name"


def test_a_link_is_kept_and_a_missing_one_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = SimpleNamespace(save=str(tmp_path), save_retain_interval=10)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "iter_0000002").symlink_to(tmp_path / "elsewhere")
    discard(args, str(tmp_path), 2, 4)
    discard(args, str(tmp_path), 3, 4)
    settled()
    assert (tmp_path / "iter_0000002").is_symlink()
    skipped, failed = capsys.readouterr().out.splitlines()
    assert "symbolic link" in skipped and "encountered exception" in failed


def test_what_a_killed_job_was_removing_goes_with_the_next(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4)
    checkpoint(tmp_path, 2).rename(tmp_path / "iter_0000002.removed")
    discard(SimpleNamespace(save=str(tmp_path), save_retain_interval=10), str(tmp_path), 4, 6)
    settled()
    assert not list(tmp_path.iterdir())


def test_a_non_persistent_checkpoint_takes_the_place_of_none_beside_it(tmp_path: Path) -> None:
    """Both folders may have one of the same step."""
    folder, args = checkpoint(tmp_path, 2), SimpleNamespace(save=str(tmp_path), save_retain_interval=10)
    args.non_persistent_ckpt_type, args.non_persistent_global_ckpt_dir = "global", None
    beside = save_folders(args)[1]
    assert Path(beside).parent == tmp_path
    discard(args, beside, 2, 4)
    settled()
    assert folder.exists()


def test_megatron_sees_no_interval_while_it_finishes_a_save() -> None:
    args = SimpleNamespace(save_retain_interval=10)
    with pytest.raises(RuntimeError), nothing_removed(args):
        assert args.save_retain_interval is None
        raise RuntimeError
    assert args.save_retain_interval == 10
