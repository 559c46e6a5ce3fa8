"""A save under way has partial names; at every moment the tracker names a whole checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from megatron.elastic.mcore.saving import Folders


class Cut(Exception):
    """The process dies here."""


def begun(folders: Folders, save: Path, iteration: int) -> Path:
    """Plan a save, write its file, and have Megatron write the tracker; returns the partial folder."""
    with folders.naming():
        partial = Path(folders.named(str(save / f"iter_{iteration:07d}")))
        tracker = Path(folders.tracked(str(save / "latest_checkpointed_iteration.txt")))
    partial.mkdir(parents=True)
    (partial / "content").write_text(str(iteration))
    assert not folders.is_written()
    tracker.write_text(str(iteration))
    assert folders.is_written()
    return partial


def tracked(save: Path) -> str:
    """The content of the checkpoint that the tracker names."""
    iteration = int((save / "latest_checkpointed_iteration.txt").read_text())
    return (save / f"iter_{iteration:07d}" / "content").read_text()


def test_a_name_is_what_megatron_asks_for_outside_a_save() -> None:
    folders = Folders(lambda point, step: None)
    assert folders.named("/a/iter_0000003") == "/a/iter_0000003" and folders.tracked("/a/t") == "/a/t"
    assert folders.final_name("/a/iter_0000003.partial") == "/a/iter_0000003"


def test_megatron_reads_in_the_new_tracker_which_checkpoint_came_before(tmp_path: Path) -> None:
    folders = Folders(lambda point, step: None)
    begun(folders, tmp_path, 2)
    folders.commit()
    with folders.naming():
        folders.named(str(tmp_path / "iter_0000004"))
        assert Path(folders.tracked(str(tmp_path / "latest_checkpointed_iteration.txt"))).read_text().strip() == "2"
    assert not folders.is_written(), "it still names the one before"


@pytest.mark.parametrize("again", [4, 2], ids=["a later one", "the same iteration anew"])
@pytest.mark.parametrize("cut_at", ["save_named", "save_tracked", "never"])
def test_at_every_cut_a_whole_checkpoint_is_tracked(tmp_path: Path, again: int, cut_at: str) -> None:
    folders = Folders(lambda point, step: None)
    begun(folders, tmp_path, 2)
    folders.commit()

    def reach(point: str, step: int) -> None:
        assert step == again
        assert tracked(tmp_path) in ("2", "4")
        if point == cut_at:
            raise Cut

    later = Folders(reach)
    partial = begun(later, tmp_path, again)
    assert tracked(tmp_path) == "2"
    with contextlib.suppress(Cut):
        later.commit()
    assert tracked(tmp_path) == (str(again) if cut_at != "save_named" or again == 2 else "2")
    later.sweep(str(tmp_path))
    assert not partial.exists() and tracked(tmp_path)
