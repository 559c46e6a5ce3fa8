"""A save under way has names of its own; at every moment the tracker names a whole checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.elastic.mcore.checkpoint.background_save import Folders
from megatron.elastic.state.manifest import FileHash, Manifest, damage, read
from megatron.elastic.state.record import StepRecord

TAG = "g3.i0.00000001"


def written(**files: FileHash) -> Manifest:
    """The lines of the writers."""
    return Manifest(3, 0, StepRecord(4).to_json(), "", files)


class Cut(Exception):
    """The process dies here."""


def nothing(*_: object) -> None:
    """A point without a fault, a lease that holds."""


def begun(folders: Folders, save: Path, iteration: int, tag: str = TAG) -> Path:
    """Plan a save, write its file, and have Megatron write the tracker; returns the partial folder."""
    with folders.naming(tag):
        partial = Path(folders.named(str(save / f"iter_{iteration:07d}")))
        tracker = Path(folders.tracked(str(save / "latest_checkpointed_iteration.txt")))
    partial.mkdir(parents=True)
    (partial / "content").write_text(str(iteration))
    dcp.save({"step": torch.tensor(iteration)}, storage_writer=dcp.FileSystemWriter(partial), no_dist=True)
    assert not folders.is_written()
    tracker.write_text(str(iteration))
    assert folders.is_written()
    return partial


def tracked(save: Path) -> str:
    """The content of the checkpoint that the tracker names."""
    iteration = int((save / "latest_checkpointed_iteration.txt").read_text())
    return (save / f"iter_{iteration:07d}" / "content").read_text()


def test_a_name_is_what_megatron_asks_for_outside_a_save() -> None:
    folders = Folders(nothing, nothing)
    assert folders.named("/a/iter_0000003") == "/a/iter_0000003" and folders.tracked("/a/t") == "/a/t"
    with folders.naming(TAG):
        assert folders.final_name(folders.named("/a/iter_0000003")) == "/a/iter_0000003"


def test_megatron_reads_in_the_new_tracker_which_checkpoint_came_before(tmp_path: Path) -> None:
    folders = Folders(nothing, nothing)
    begun(folders, tmp_path, 2)
    folders.commit(written())
    with folders.naming(TAG):
        folders.named(str(tmp_path / "iter_0000004"))
        assert Path(folders.tracked(str(tmp_path / "latest_checkpointed_iteration.txt"))).read_text().strip() == "2"
    assert not folders.is_written(), "it still names the one before"


def test_a_tracker_that_names_a_later_step_completes_no_checkpoint(tmp_path: Path) -> None:
    """Training has gone on while the files were written, and the tracker was made from the step that it is at now."""
    folders = Folders(nothing, nothing)
    begun(folders, tmp_path, 2)
    folders.commit(written())
    with folders.naming(TAG):
        Path(folders.named(str(tmp_path / "iter_0000004"))).mkdir()
        tracker = Path(folders.tracked(str(tmp_path / "latest_checkpointed_iteration.txt")))
    tracker.write_text("5")
    assert not folders.is_written(), "so it is never renamed"
    assert tracked(tmp_path) == "2"


@pytest.mark.parametrize("again", [4, 2], ids=["a later one", "the same iteration anew"])
@pytest.mark.parametrize("cut_at", ["save_whole", "save_named", "save_tracked", "never"])
def test_at_every_cut_a_whole_checkpoint_is_tracked(tmp_path: Path, again: int, cut_at: str) -> None:
    folders = Folders(nothing, nothing)
    begun(folders, tmp_path, 2)
    folders.commit(written())

    def reach(point: str, step: int) -> None:
        assert step == again
        assert tracked(tmp_path) in ("2", "4")
        if point == cut_at:
            raise Cut

    later = Folders(reach, nothing)
    partial = begun(later, tmp_path, again)
    assert tracked(tmp_path) == "2"
    with contextlib.suppress(Cut):
        later.commit(written())
    assert tracked(tmp_path) == (str(again) if cut_at in ("save_tracked", "never") or again == 2 else "2")
    later.sweep(str(tmp_path))
    assert not partial.exists() and tracked(tmp_path)


def test_the_lease_is_looked_at_directly_before_each_rename(tmp_path: Path) -> None:
    """A rank that is stopped at a point and wakes up without its lease renames nothing."""
    final, tracker = tmp_path / "iter_0000004", tmp_path / "latest_checkpointed_iteration.txt"
    for lost_at, named in (("save_whole", False), ("save_named", True)):
        passed: list[str] = []

        def fence(lost_at: str = lost_at, passed: list[str] = passed) -> None:
            if lost_at in passed:
                raise Cut

        def reach(point: str, step: int, passed: list[str] = passed) -> None:
            passed.append(point)

        folders = Folders(reach, fence)
        folders.sweep(str(tmp_path))
        begun(folders, tmp_path, 4)
        with pytest.raises(Cut):
            folders.commit(written())
        assert (final.exists(), tracker.exists()) == (named, False) and passed[-1] == lost_at


def test_who_wakes_up_late_finds_no_file_to_rename_and_none_of_the_others_under_its_names(tmp_path: Path) -> None:
    """Even between the look at the lease and the rename: the others have swept what it would rename."""
    theirs = Folders(nothing, nothing)

    def stopped(point: str, step: int) -> None:
        theirs.sweep(str(tmp_path))
        assert begun(theirs, tmp_path, 4, "g4.i0.00000002").is_dir()

    late = Folders(stopped, nothing)
    begun(late, tmp_path, 4)
    with pytest.raises(FileNotFoundError):
        late.commit(written())
    assert not (tmp_path / "iter_0000004").exists() and not (tmp_path / "latest_checkpointed_iteration.txt").exists()
    theirs.commit(written())
    assert tracked(tmp_path) == "4"


def test_a_checkpoint_has_the_hash_of_every_file_and_no_name_when_one_is_not_as_its_writer_says(tmp_path: Path) -> None:
    folders = Folders(nothing, nothing)
    begun(folders, tmp_path, 4)
    with pytest.raises(OSError, match=r"content of .* differs from the file that its writer reported"):
        folders.commit(written(content=FileHash(2, "0" * 32)))
    with pytest.raises(OSError, match="missing of"):
        folders.commit(written(missing=FileHash(0, "0" * 32)))
    assert not (tmp_path / "iter_0000004").exists()
    folders.commit(written())
    manifest = read(tmp_path / "iter_0000004")
    assert manifest is not None and sorted(manifest.files) == [".metadata", "__0_0.distcp", "content"]
    assert damage(tmp_path / "iter_0000004", manifest.files) == []
    (tmp_path / "iter_0000004" / "content").write_text("5")
    assert damage(tmp_path / "iter_0000004", manifest.files) == ["content is not what was written"]
