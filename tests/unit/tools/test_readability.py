"""Figures of readability: counted on a small tree, told of another checkout, one line for what cannot be read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tools.benchmark_docs import page
from tools.readability import ROOT, faults, main, measure, sentences

SHAPES = '''"""Shapes of the plane.

A house for squares. See also:

    square(2)
"""

# What follows is short. It
# stands on nothing.
def square(side: int, *, name="a") -> int:
    """Return the area."""
    return side * side  # noqa: E501


class Circle:
    """A circle."""

    def area(self, radius: float) -> float:
        return 3 * radius * radius

    def _hidden(self, radius): ...
'''
TREE = {
    "pack/__init__.py": "",
    "pack/shapes.py": SHAPES,
    "pack/deep/other.py": "class Circle: ...\n",
    "pack/deep/named.py": "x = 1\n",
    "pack/deep/alone.py": "x = 1\n",
    "tests/test_shapes.py": "from pack.deep import other\nimport pack.shapes\nRUN = 'python -m pack.deep.named'\n",
    "setup.py": "def left_out(): ...\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "small"
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_everything_is_counted(tree: Path) -> None:
    figures = measure(tree, "pack")
    assert (figures.files, figures.files_a_folder_max) == (5, 3)
    assert (figures.function_lines_median, figures.function_lines_max) == (2, 3)
    assert (figures.file_lines_median, figures.file_lines_max) == (1, 21)
    assert figures.annotated_arguments == 0.5, "one side and one radius; not the name and the other radius"
    assert figures.documented_public_functions == 0.5, "square, not area; _hidden is not asked"
    assert figures.class_names_used_twice == ["Circle"]
    assert figures.modules_no_test_imports == ["pack.deep.alone"]
    # Of "house" and "stands on" in: shapes, a house, see also, what follows, it stands on, return, a circle.
    assert (figures.sentences, figures.sentences_against_the_style) == (7, round(2 / 7, 4))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Return the sum.", 0),
        ("What a sum is.", 1),
        ("Whether it is. It is.", 1),
        ("The one who knows.", 0),
        ("Words: " + "word " * 35, 1),
        ("Words: " + "word " * 34, 0),
        ("Nobody waits. A rank tells whoever asks. All ranks know.", 2),
        ("The agent mourns. The ranks next to it are its neighbours.", 2),
    ],
)
def test_sentences_against_the_style(text: str, count: int) -> None:
    assert len(faults(text)) == count


def test_this_repository_keeps_its_targets() -> None:
    """``python -m tools.readability --tell`` names the sentences."""
    figures = measure(ROOT, "megatron/elastic")
    assert figures.class_names_used_twice == []
    assert figures.modules_no_test_imports == []
    assert figures.sentences_against_the_style == 0.0


def test_examples_and_tables_are_no_sentences() -> None:
    text = "One. Two.\n\n    example(1)\n\n| a | b |\n\n* first\n  half\n* second"
    assert sentences(text) == ["One.", "Two.", "first half", "second"]


def test_the_last_line_is_json_and_another_checkout_is_measured_whole(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tree.with_name("other")
    other.mkdir()
    (other / "a.py").write_text("def f(x): return x\n")
    (other / "broken.py").write_text("def f(:\n")
    assert main([str(tree), str(other), "--package", "pack", "--tell"]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out.splitlines()[-1])
    assert figures["small"]["class_names_used_twice"] == ["Circle"] and figures["other"]["files"] == 1
    assert f"{tree}/pack/shapes.py: A house for squares." in out
    assert "broken.py is left out" in err


def test_a_folder_without_python_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == [f"readability: {tmp_path}: no Python files"]


def test_tests_beside_the_code_import_by_relative_and_by_installed_names(tmp_path: Path) -> None:
    """``src`` is no part of an imported name, and a test may lie in the package and end in ``_test.py``."""
    files = {
        "src/pack/__init__.py": "",
        "src/pack/near.py": "",
        "src/pack/far.py": "",
        "src/pack/alone.py": "",
        "src/pack/near_test.py": "from . import near\n",
        "tests/test_far.py": "from pack.far import x\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert measure(tmp_path, "src/pack").modules_no_test_imports == ["src.pack.alone"]


def test_a_record_becomes_a_section_of_the_page(tree: Path) -> None:
    """Each checkout is measured in the folder that its argument names."""
    folder = tree.with_name("measured")
    folder.mkdir()
    other = shutil.copytree(tree, tree.with_name("other"))
    assert main([f"{other}:pack/deep", f"{tree}:pack", "--record", str(folder / "readability.json")]) == 0
    rows = [line.split("|")[1:-1] for line in page(folder).splitlines() if line.startswith("|")]
    figures = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert figures["figure"] == ["other", "small"]
    assert figures["files"] == ["3", "5"] and figures["class names used twice"] == ["0", "1"]
