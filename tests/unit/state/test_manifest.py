"""Whatever happens to a file of a checkpoint, or to its manifest, is found."""

from __future__ import annotations

import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.state.layout import UnitLayout
from megatron.elastic.state.manifest import (
    MANIFEST,
    FileHash,
    HashingFile,
    Manifest,
    ManifestError,
    damage,
    files_below,
    hash_of,
    read,
    shares,
)
from megatron.elastic.state.record import GradientKey, Rate, StepRecord
from megatron.elastic.state.saved_contents import SavedContents, layout_digest
from tests.unit.state.test_certificate import LAYOUT

FILES = st.dictionaries(
    st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), min_size=1).filter(lambda n: n != ".."),
    st.builds(FileHash, st.integers(0, 1 << 50), st.text("0123456789abcdef", min_size=32, max_size=32)),
    max_size=6,
)
RECORD = StepRecord(
    7, grad_norm=float("nan"), rates=(Rate(1e-3, 0.1),), gradient=GradientKey(6, 2), losses={"lm loss": (0.1, 3.0)}
)


CONTENTS = SavedContents("e" * 32, {(0, 0, 1): "a" * 32, (3, 1, 0): "b" * 32})


def manifest(files: dict[str, FileHash]) -> Manifest:
    return Manifest(2, 1, RECORD.to_json(), "c" * 32, files, CONTENTS)


@given(FILES)
def test_a_manifest_is_read_as_it_was_written(files: dict[str, FileHash]) -> None:
    again = Manifest.from_text(manifest(files).to_text())
    assert again == manifest(files) and again.digest == manifest(files).digest
    assert StepRecord.from_json(again.record) == RECORD


def test_a_manifest_of_an_older_version_has_no_contents() -> None:
    before = replace(manifest({}), contents=None)
    assert "contents" not in before.to_text() and Manifest.from_text(before.to_text()) == before


def test_contents_are_comparable_where_blocks_and_places_of_parameters_are_the_same() -> None:
    other = UnitLayout.build(LAYOUT.unit, LAYOUT.shard, [slot.spec for slot in LAYOUT.slots], 2048)
    digests = {layout_digest({(1, 0): layout}) for layout in (LAYOUT, other)}
    assert len(digests | {layout_digest({(2, 0): LAYOUT})}) == 3
    assert layout_digest({(1, 0): LAYOUT}) in digests


@settings(max_examples=300)
@given(FILES, st.integers(0, 1 << 30), st.characters(exclude_categories=["Cs"]))
def test_a_changed_character_is_found_or_changes_nothing(files: dict[str, FileHash], at: int, other: str) -> None:
    text = manifest(files).to_text()
    at %= len(text)
    try:
        again = Manifest.from_text(text[:at] + other + text[at + 1 :])
    except ManifestError:
        return
    assert again == manifest(files)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"manifest": {}, "hash": 3}', "[" * 100_000])
def test_what_is_no_manifest_is_one(text: str) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_text(text)


def test_files_outside_the_checkpoint_are_refused() -> None:
    for name in ("/etc/passwd", "../other/file", "a/../../b"):
        with pytest.raises(ManifestError, match="outside"):
            Manifest.from_text(manifest({name: FileHash(0, "0")}).to_text())


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_what_is_hashed_as_it_is_written_is_what_is_read(pieces: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        with open(path, "wb") as raw:
            file = HashingFile(raw)
            for piece in pieces:
                before = file.tell()
                assert file.write(memoryview(piece)) == len(piece) == file.tell() - before
            written = file.sync()
        assert written == hash_of(path) and written.size == path.stat().st_size


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(3).randrange(len(data))] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (flip, "is not what was written"),
        (lambda path: os.truncate(path, 5), "has 5 bytes, 1000 were written"),
        (os.remove, "is missing"),
        (lambda path: (os.remove(path), os.mkdir(path)), ""),
    ],
    ids=["a flipped bit", "cut", "gone", "a folder in its place"],
)
def test_harm_to_any_file_is_named(tmp_path: Path, harm: object, said: str) -> None:
    (tmp_path / "below").mkdir()
    names = ["__0_0.distcp", "__1_0.distcp", ".metadata", "below/common.pt"]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(random.Random(number).randbytes(1000))
    assert files_below(tmp_path) == sorted(names)
    written = {name: hash_of(tmp_path / name) for name in names}
    (tmp_path / MANIFEST).write_text(manifest(written).to_text())
    assert files_below(tmp_path) == sorted(names), "the manifest is none of its files"
    known = read(tmp_path)
    assert known is not None and damage(tmp_path, known.files) == []
    for name in names:
        kept = (tmp_path / name).read_bytes()
        assert callable(harm)
        harm(tmp_path / name)
        found = damage(tmp_path, known.files)
        assert len(found) == 1 and found[0].startswith(name) and said in found[0]
        if (tmp_path / name).is_dir():
            (tmp_path / name).rmdir()
        (tmp_path / name).write_bytes(kept)


def test_without_a_manifest_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    (tmp_path / MANIFEST).write_bytes(b"\xff\xfe")
    with pytest.raises(ManifestError):
        read(tmp_path)


@given(FILES, st.integers(1, 9))
def test_shares_are_everything_once_and_alike(files: dict[str, FileHash], parts: int) -> None:
    split = shares(files, parts)
    assert sorted(name for part in split for name in part) == sorted(files) and len(split) == parts
    assert {name: file for part in split for name, file in part.items()} == files
    sizes = [sum(file.size for file in part.values()) for part in split]
    assert max(sizes) - min(sizes) <= max((file.size for file in files.values()), default=0)
