"""Every patched name exists, with the shape on record, in every Megatron release the table covers.

Releases are read as text: nothing of them is imported. The record
(``megatron_signatures.json``) is written by ``python -m megatron.elastic.mcore.patching.contract --record``;
a difference means that a name moved, a signature changed, or a row was added.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.elastic.mcore.patching import absent_imports
from megatron.elastic.mcore.patching.contract import VERSIONS, Wheel, fetch, shapes, used_names
from megatron.elastic.mcore.patching.import_graph import absent_imports_of
from megatron.elastic.mcore.patching.patches import bound
from megatron.elastic.mcore.patching.releases import PATCHED, TESTED, TESTED_TORCH, between_releases, in_range

ROOT = Path(__file__).resolve().parents[3]
RECORD = json.loads((Path(__file__).parent / "megatron_signatures.json").read_text())
EACH = [pytest.param(one, marks=() if one == VERSIONS[0] else pytest.mark.slow) for one in VERSIONS]
"""The oldest release in each run of the tests, the others in long ones."""

LIST_TABLE = """
import json, inspect
from megatron.elastic.mcore.patching.table import whole_table
from megatron.elastic.mcore.patching.contract import VERSIONS, expected, used_names
import textwrap
table = whole_table()
print(json.dumps({
    "expected": {version: expected(table, version) for version in VERSIONS},
    "reads": [[row.symbol, row.versions, sorted(used_names(textwrap.dedent(inspect.getsource(row.make))))]
              for row in table],
}))
"""


@cache
def table() -> dict[str, Any]:
    """The whole patch table, listed by a process of its own: it imports Megatron."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ELASTIC_PLATFORM": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", LIST_TABLE], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    listed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return listed


def wheel(version: str) -> Wheel:
    try:
        return Wheel(fetch(version))
    except OSError as error:
        pytest.skip(f"the release cannot be downloaded here: {error}")


@pytest.mark.parametrize("version", EACH)
def test_every_patched_name_is_there_with_the_shape_on_record(version: str) -> None:
    found = shapes(wheel(version), table()["expected"][version])
    seen = {
        symbol: None if shape is None else {"parameters": list(shape.parameters), "returns": list(shape.returns)}
        for symbol, shape in found.items()
    }
    assert all(shape is not None for shape in seen.values()), [name for name, shape in seen.items() if shape is None]
    again = "record anew with python -m megatron.elastic.mcore.patching.contract --record, and look"
    assert seen == RECORD[version], again


@pytest.mark.parametrize("version", EACH)
def test_replacements_read_only_arguments_the_release_has(version: str) -> None:
    replaced = table()["expected"][version]
    for symbol, _, names in table()["reads"]:
        if names and symbol in replaced:
            missing = set(names) - set(RECORD[version][symbol]["parameters"])
            assert not missing, f"{symbol} in {version} has no parameter {sorted(missing)}"


@pytest.mark.parametrize("version", EACH)
def test_every_import_that_fails_without_a_gpu_or_on_an_older_python_has_a_row(version: str) -> None:
    rows = {(row.importer, row.imported) for row in absent_imports.ROWS if in_range(version, row.versions)}
    assert absent_imports_of(wheel(version)) == rows


def test_a_moved_name_is_noticed() -> None:
    """The check can fail: a symbol no release has comes back as missing."""
    found = shapes(wheel("0.17.1"), ["megatron.training.training.train_stepp", "megatron.core.nowhere.at_all"])
    assert set(found.values()) == {None}


def test_a_name_imported_from_elsewhere_is_followed_to_its_definition() -> None:
    found = shapes(wheel("0.17.1"), ["megatron.training.pretrain"])["megatron.training.pretrain"]
    assert found is not None and "forward_step_func" in found.parameters


def test_used_names_are_those_read_and_not_guarded() -> None:
    def maker() -> None:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            call = bound(maker, args, kwargs)
            call["written"] = 1
            if "guarded" in call:
                return call["guarded"]
            return call["read"], call.get("optional"), call["written"]

    assert used_names(textwrap.dedent(inspect.getsource(maker))) == {"read"}


def test_the_range_that_a_start_accepts_is_that_of_the_record_and_of_the_package() -> None:
    assert all(in_range(version, TESTED) for version in VERSIONS)
    assert all(in_range(version, PATCHED) for version in (*VERSIONS, "0.20.0")) and not in_range("0.21.0", PATCHED)
    assert between_releases("0.20.0").count("\n") == 0 and not any(map(between_releases, VERSIONS))
    assert not in_range("0.20.0", TESTED) and not in_range("0.16.9", TESTED)
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"megatron-core{TESTED}; python_version >= '3.12'" in wanted and f"torch{TESTED_TORCH}" in wanted, wanted
