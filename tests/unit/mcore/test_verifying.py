"""The newest checkpoint whose files match its manifest is loaded; of damage, one line says what and where."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.elastic.comm.backend import install
from megatron.elastic.comm.native import NativeFabric
from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.checkpoint.verifying import legible, verified
from megatron.elastic.state.manifest import MANIFEST, Manifest, files_below, hash_of
from megatron.elastic.state.record import StepRecord
from tools.bench._common import Here, Ranks

TRACKER = "latest_checkpointed_iteration.txt"


def checkpoint(save: Path, step: int, manifest: bool = True) -> Path:
    folder = save / f"iter_{step:07d}"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text("{}")
    (folder / "__0_0.distcp").write_bytes(bytes(range(step, step + 100)))
    files = {name: hash_of(folder / name) for name in files_below(folder)}
    if manifest:
        (folder / MANIFEST).write_text(Manifest(1, 0, StepRecord(step).to_json(), "", files).to_text())
    (save / TRACKER).write_text(str(step))
    return folder


def _load(here: Here) -> list[Any]:
    """For each (--load, --ckpt-step, non-persistent ones too): the choice inside or the error, and the lines said.

    The choice is the step instead of Megatron's own; with non-persistent ones its folder too, and their type.
    """
    fabric = NativeFabric(0, 1, 0, run_id="alone", secret=b"x" * 32)
    install(fabric)
    fabric.edit(1, {0: fabric.address()}, 10.0)
    answers = []
    for load, step, beside in here.ask():
        given = {"load": load, "ckpt_step": step, "pretrained_checkpoint": None}
        given |= {"non_persistent_ckpt_type": "global" if beside else None, "non_persistent_global_ckpt_dir": None}
        args, lines = SimpleNamespace(**given), list[str]()
        try:
            with verified(args, fabric, lines.append) as manifest:
                chosen: Any = args.ckpt_step
                if beside:
                    saved = None if manifest is None else StepRecord.from_json(manifest.record).version
                    chosen = Path(args.load).name, args.ckpt_step, args.non_persistent_ckpt_type, saved
        except BadInput as error:
            chosen = str(error)
        assert vars(args) == given, "the arguments are their own again afterwards"
        answers.append((chosen, lines))
    return answers


def loaded(*asked: tuple[Path, int | None], beside: bool = False) -> list[tuple[Any, list[str]]]:
    with Ranks(1, _load) as ranks:
        ranks.say(0, [(str(folder), step, beside) for folder, step in asked])
        return [tuple(answer) for answer in ranks.results([0])[0]]


def test_damage_is_found_and_an_older_checkpoint_taken_in_its_place(tmp_path: Path) -> None:
    whole, cut, flipped, forged, plain, gone = (tmp_path / name for name in ("w", "c", "f", "m", "p", "g"))
    for save in (whole, cut, flipped, forged, gone):
        checkpoint(save, 5)
        checkpoint(save, 10)
    checkpoint(plain, 3, manifest=False)
    with open(cut / "iter_0000010" / "__0_0.distcp", "r+b") as file:
        file.truncate(60)
    with open(flipped / "iter_0000010" / "__0_0.distcp", "r+b") as file:
        file.write(b"\xff")
    text = (forged / "iter_0000010" / MANIFEST).read_text()
    (forged / "iter_0000010" / MANIFEST).write_text(text.replace('"generation": 1', '"generation": 9'))
    (gone / TRACKER).write_text("20")
    found = dict(
        zip("wcfmpgx", loaded(*((p, None) for p in (whole, cut, flipped, forged, plain, gone)), (cut, 10)), strict=True)
    )
    step, lines = found["w"]
    assert step is None and len(lines) == 1 and "iter_0000010 is verified" in lines[0], "Megatron's own choice"
    for name in "cfm":
        step, lines = found[name]
        assert step == 5 and ["is skipped" in line for line in lines] == [True, False], name
    assert "__0_0.distcp" in found["c"][1][0] and "__0_0.distcp" in found["f"][1][0]
    assert "manifest cannot be relied on" in found["m"][1][0]
    assert found["p"] == (None, [line for line in found["p"][1] if "loaded unverified" in line])
    assert found["g"][0] == 10 and "it is not there" in found["g"][1][0]
    refused, lines = found["x"]
    assert "no checkpoint there can be loaded" in refused and "--ckpt-step" in refused and not lines, "no other step"


def test_a_checkpoint_of_the_older_format_is_named_as_such(tmp_path: Path) -> None:
    old = tmp_path / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"values")
    (tmp_path / TRACKER).write_text("5")
    ((refused, _),) = loaded((tmp_path, None))
    assert "it is of --ckpt-format torch: convert it with plain Megatron, --ckpt-convert-format torch_dist" in refused


def test_a_folder_without_a_readable_tracker_is_left_to_megatron_or_refused(tmp_path: Path) -> None:
    empty, odd, broken = (tmp_path / name for name in ("empty", "odd", "broken"))
    for folder in (empty, odd):
        folder.mkdir()
    (odd / TRACKER).write_text("ten")
    with open(checkpoint(broken, 4) / "__0_0.distcp", "ab") as file:
        file.write(b"more")
    found = loaded((empty, None), (odd, None), (broken, None))
    assert found[0] == (None, []), "nothing to load"
    assert "holds 'ten', not the number of a step" in found[1][0]
    assert "iter_0000004" in found[2][0] and "no checkpoint there can be loaded" in found[2][0]


def test_a_newer_non_persistent_checkpoint_is_verified_in_place_of_the_others(tmp_path: Path) -> None:
    """Megatron loads it: the state is compared with its manifest, not with that of the one that --load names."""
    newer, older, cut, alone, odd = (tmp_path / name for name in ("newer", "older", "cut", "alone", "odd"))
    for save, steps, others in (
        (newer, (5,), (6, 8)),
        (older, (5, 10), (6, 8)),
        (cut, (5,), (6, 8)),
        (alone, (), (6,)),
        (odd, (5,), (6,)),
    ):
        for step in steps:
            checkpoint(save, step)
        for step in others:
            checkpoint(save / "non_persistent", step)
    for number in (6, 8):
        (cut / "non_persistent" / f"iter_{number:07d}" / "__0_0.distcp").unlink()
    (odd / "non_persistent" / TRACKER).write_text("six")
    asked = ((newer, None), (older, None), (cut, None), (alone, None), (odd, None), (newer, 5), (older, 10))
    found = loaded(*asked, beside=True)
    assert found[0][0] == ("newer", None, "global", 8) and "non_persistent/iter_0000008 is verified" in found[0][1][0]
    assert found[1][0] == ("older", None, "global", 10), "Megatron's own choice"
    assert found[2][0] == ("cut", 5, None, 5) and ["is skipped" in line for line in found[2][1]] == [True, True, False]
    assert found[3][0] == ("alone", None, "global", 6)
    assert "holds 'six', not the number of a step" in found[4][0]
    assert found[5][0] == ("newer", 5, "global", 8), "Megatron prefers a newer one to --ckpt-step"
    assert found[6][0] == ("older", 10, "global", 10)


def test_an_older_non_persistent_checkpoint_is_loaded_where_the_newest_is_damaged(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path / "non_persistent", 4)
    (checkpoint(tmp_path / "non_persistent", 6) / "__0_0.distcp").unlink()
    ((chosen, lines),) = loaded((tmp_path, None), beside=True)
    assert chosen == ("non_persistent", 4, None, 4)
    assert [("is skipped" in line, "non_persistent/" in line) for line in lines] == [(True, True), (False, True)]


def test_arguments_are_read_from_the_newest_checkpoint_whose_common_values_are_whole(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        folder = tmp_path / f"iter_{step:07d}"
        folder.mkdir()
        for name in ("common.pt", "metadata.json", "__0_0.distcp"):
            (folder / name).write_bytes(bytes(range(step)))
        files = {name: hash_of(folder / name) for name in files_below(folder)}
        (folder / MANIFEST).write_text(Manifest(1, 0, StepRecord(step).to_json(), "", files).to_text())
    (tmp_path / TRACKER).write_text("6")
    args = SimpleNamespace(load=str(tmp_path), ckpt_step=None, pretrained_checkpoint=None)
    args.non_persistent_ckpt_type = args.non_persistent_global_ckpt_dir = None
    before = dict(vars(args))

    def chosen(argument: str = "load") -> tuple[Any, Any]:
        with legible(args, argument):
            return args.load, args.ckpt_step

    assert chosen() == (str(tmp_path), None), "Megatron's own choice"
    (tmp_path / "iter_0000006" / "__0_0.distcp").unlink()
    assert chosen() == (str(tmp_path), None), "the values of tensors are of no concern here"
    (tmp_path / "iter_0000006" / "common.pt").write_bytes(b"")
    assert chosen() == (str(tmp_path), 4)
    (tmp_path / "iter_0000004" / "metadata.json").unlink()
    assert chosen() == (str(tmp_path), 2)
    (tmp_path / "iter_0000002" / MANIFEST).write_text("{}")
    assert chosen() == (str(tmp_path), None), "Megatron then says why"
    assert chosen("pretrained_checkpoint") == (str(tmp_path), None)
    assert vars(args) == before
