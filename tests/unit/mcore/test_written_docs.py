"""A page of the documentation is printed, or written to a path whose folder need not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.elastic.mcore.args.written_docs import write_or_print


def test_the_page_goes_to_the_path_or_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = "# Seiten\n\n× und →\n"
    target = tmp_path / "docs" / "page.md"
    assert write_or_print("pack.module", "Writes.", lambda: page, ["--write-docs", str(target)]) == 0
    assert target.read_text(encoding="utf-8") == page and capsys.readouterr().out == ""
    assert write_or_print("pack.module", "Writes.", lambda: page, []) == 0
    assert capsys.readouterr().out == page


def test_a_wrong_flag_names_the_module_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        write_or_print("pack.module", None, lambda: pytest.fail("not asked for"), ["--write", "x", "y"])
    assert "python -m pack.module" in capsys.readouterr().err
