"""The page of other projects' bugs: every row has its source, and names tests and code that exist."""

from __future__ import annotations

import re

from tests.unit.tools.test_design import ROOT, definitions, everything, page, spans

CASES = {
    "Megatron-LM": {1570, 761, 599, 1446, 1770, 2789, 2658, 4828, 6920, 5281, 1713, 7452},
    "Megatron-Bridge": {3267},
    "DeepSpeed": {6771, 4272, 6691, 7546, 7584},
    "torchft": {309},
    "NVRx": {348},
}


def rows() -> list[list[str]]:
    """The cells of each row of the table."""
    lines = [line for line in page("bugs-of-others.md").splitlines() if line.startswith("| [")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_case_has_one_row_with_its_source() -> None:
    found: dict[str, set[int]] = {}
    for case, *_ in rows():
        match = re.fullmatch(r"\[([\w-]+) (\d+)\]\(https://github\.com/\S+/(?:issues|pull)/(\d+)\)", case)
        assert match and match[2] == match[3], case
        assert int(match[2]) not in found.setdefault(match[1], set())
        found[match[1]].add(int(match[2]))
    assert found == CASES


def test_every_row_names_tests_that_exist() -> None:
    for row in rows():
        assert len(row) == 6, row
        named = spans(row[5])
        assert named, row[0]
        for test in named:
            path, _, name = test.partition("::")
            assert (ROOT / path).is_file() and name in definitions(ROOT / path), f"{row[0]}: {test}"


def test_the_functions_that_rows_name_exist() -> None:
    for row in rows():
        for name in spans(" ".join(row[2:4])):
            if re.fullmatch(r"[A-Za-z_]\w*(?:\.\w+)?", name) and name != "replica_id":
                assert name in everything(), f"{row[0]}: {name}"
