"""Replacement by identity: caught wherever a name was bound, once, undone without a trace."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron.elastic.mcore.patching.patches import (
    Patch,
    PatchError,
    apply,
    bound,
    describe,
    return_names,
)
from megatron.elastic.mcore.patching.releases import in_range

VERSION = "0.17.1"


def step(forward: Any, data: Any, iteration: int | None = None) -> tuple[dict[str, float], int, Any]:
    """Stands for Megatron's train_step in the modules made here."""
    if data is None:
        return {}, 1, None
    loss, skipped, norm = {"lm loss": 1.0}, 0, iteration
    return loss, skipped, norm


class Norm:
    def __new__(cls, size: int) -> Any:
        return ("norm", size)

    def method(self) -> str:
        return "original"

    @staticmethod
    def static(x: int) -> int:
        return x


def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ("replaced", original(*args, **kwargs))

    return replacement


@pytest.fixture
def modules() -> Iterator[tuple[types.ModuleType, types.ModuleType]]:
    """A library that defines ``step`` and a script that bound it by value, under another name too."""
    library, script = types.ModuleType("patched_library"), types.ModuleType("patched_script")
    library.step, library.Norm = step, Norm  # type: ignore[attr-defined]
    script.train, script.mine = step, step  # type: ignore[attr-defined]
    sys.modules.update({library.__name__: library, script.__name__: script})
    yield library, script
    for module in (library, script):
        del sys.modules[module.__name__]


def row(symbol: str = "patched_library.step", versions: str = ">=0.17,<0.20") -> Patch:
    return Patch(symbol, "a reason", doubled, versions)


def test_a_name_bound_by_value_elsewhere_is_replaced_too(modules: Any) -> None:
    library, script = modules
    patches = apply([row()], VERSION)
    assert library.step is script.train is script.mine
    assert script.train("forward", None)[0] == "replaced"
    patches.undo()


def test_undo_restores_every_place(modules: Any) -> None:
    library, script = modules
    original = library.step
    patches = apply([row(), row("patched_library.Norm.static"), row("patched_library.Norm.method")], VERSION)
    replaced: Any = Norm.static(3)
    assert replaced == ("replaced", 3) and Norm(2) == ("norm", 2)
    patches.undo()
    assert library.step is script.train is script.mine is original
    assert Norm.static(3) == 3 and Norm.method(object.__new__(Norm)) == "original"
    assert isinstance(vars(Norm)["static"], staticmethod)
    patches.undo()


def test_applying_twice_is_applying_once(modules: Any) -> None:
    library, _ = modules
    patches = apply([row()], VERSION)
    once = library.step
    apply([row()], VERSION, into=patches)
    assert library.step is once and len(patches.applied) == 1
    patches.undo()


def test_new_is_replaced_as_the_static_method_it_is(modules: Any) -> None:
    patches = apply([row("patched_library.Norm.__new__")], VERSION)
    assert Norm(5) == ("replaced", ("norm", 5))
    patches.undo()
    assert Norm(5) == ("norm", 5)


def test_a_row_for_another_version_is_left_out(modules: Any) -> None:
    library, _ = modules
    patches = apply([row(versions=">=0.19")], VERSION)
    assert library.step is step and not patches.applied


@pytest.mark.parametrize("symbol", ["patched_library.gone", "patched_library.Norm.gone", "no_such_library.step"])
def test_a_missing_symbol_is_an_error_and_leaves_nothing_half_patched(modules: Any, symbol: str) -> None:
    library, _ = modules
    with pytest.raises(PatchError, match=symbol):
        apply([row(), row(symbol)], VERSION)
    assert library.step is step


@pytest.mark.parametrize(
    ("version", "versions", "inside"),
    [
        ("0.17.1", ">=0.17,<0.20", True),
        ("0.20.0", ">=0.17,<0.20", False),
        ("0.16.1", ">=0.17", False),
        ("0.9.0", ">=0.12", False),
        ("0.17.0rc1", "==0.17", True),
        ("0.18.2", "<=0.18.2,>0.18.1", True),
    ],
)
def test_version_ranges_compare_numbers_not_text(version: str, versions: str, inside: bool) -> None:
    assert in_range(version, versions) is inside


def test_arguments_are_seen_by_name_with_defaults() -> None:
    assert bound(step, ("f",), {"data": 2}) == {"forward": "f", "data": 2, "iteration": None}
    with pytest.raises(TypeError):
        bound(step, (), {})


def test_return_names_are_those_of_the_last_return() -> None:
    assert return_names(step) == ("loss", "skipped", "norm")
    assert return_names(doubled(step)) == ("loss", "skipped", "norm"), "seen through a wrapper"


def test_the_table_says_symbol_reason_and_range() -> None:
    text = describe([row(), row(versions=">=0.19")], VERSION)
    assert "patched_library.step  [elastic; >=0.17,<0.20]" in text
    assert "a reason" in text and "not this version" in text


def test_two_rows_on_one_name_stack_in_order(modules: Any) -> None:
    library, script = modules
    first = Patch("patched_library.step", "first", doubled, ">=0.17", "platform")
    patches = apply([first, row()], VERSION)
    assert script.train("forward", None) == ("replaced", ("replaced", ({}, 1, None)))
    apply([first, row()], VERSION, into=patches)
    assert script.train("forward", None) == ("replaced", ("replaced", ({}, 1, None)))
    patches.undo()
    assert library.step is script.mine is step
