"""The patches at start: each replaces a function that exists, and each replacement does what its reason says."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.patching.patches import Patch, PatchSet
from megatron.elastic.mcore.patching.startup import Startup
from megatron.elastic.platform.cpu import CpuPlatform
from megatron.elastic.platform.cuda import CudaPlatform


@pytest.fixture
def rows() -> dict[str, Patch]:
    """Those of a machine without a GPU, by the last part of the symbol."""
    return {patch.symbol.rpartition(".")[2]: patch for patch in Startup(CpuPlatform()).rows()}


def target(symbol: str) -> Any:
    """The function of Megatron that ``symbol`` names."""
    parts = symbol.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AssertionError(symbol)


def test_a_gpu_needs_only_the_argument_rows_and_a_cpu_a_few_more() -> None:
    cpu, cuda = Startup(CpuPlatform()).rows(), Startup(CudaPlatform()).rows()
    assert [patch.symbol for patch in cuda] == [patch.symbol for patch in cpu][: len(cuda)]
    assert all(not patch.symbol.startswith("megatron.core.dist_checkpointing") for patch in cuda)
    assert len({patch.symbol for patch in cpu}) == len(cpu) > len(cuda)
    assert isinstance(Startup(CpuPlatform()).in_force, PatchSet)


def test_every_replacement_wraps_the_function_it_names(rows: dict[str, Patch]) -> None:
    for patch in rows.values():
        if patch.symbol.rpartition(".")[2] in ("_get_field_docstrings", "__new__"):
            continue  # not in every release; a class's own constructor
        original = target(patch.symbol)
        made = patch.make(original)
        assert callable(made) and made.__wrapped__ is original, patch.symbol


def test_pipeline_outputs_are_kept_until_an_asynchronous_send_has_read_them(rows: dict[str, Patch]) -> None:
    made = rows["core_transformer_config_from_args"].make(
        lambda args: SimpleNamespace(deallocate_pipeline_outputs=True, batch_p2p_sync=True, kept=args)
    )
    config = made(7)
    assert (config.deallocate_pipeline_outputs, config.batch_p2p_sync, config.kept) == (False, False, 7)


@pytest.mark.parametrize("error", [ValueError, AssertionError, NotImplementedError])
def test_a_configuration_that_megatron_refuses_is_bad_input(rows: dict[str, Patch], error: type[Exception]) -> None:
    def refused(args: object) -> None:
        raise error("only one of\n the two")

    with pytest.raises(BadInput, match=r"^only one of the two$"):
        rows["core_transformer_config_from_args"].make(refused)(7)


def test_split_sizes_are_a_list_of_numbers_on_every_device(rows: dict[str, Patch]) -> None:
    original = moe_utils.maybe_move_tensor_to_cpu
    made, sizes = rows["maybe_move_tensor_to_cpu"].make(original), torch.tensor([3, 5])
    assert isinstance(original(sizes, as_numpy=True), torch.Tensor), "Megatron moves only what lies on a GPU"
    assert made(sizes, as_numpy=True).tolist() == [3, 5] and not isinstance(made(sizes, as_numpy=True), torch.Tensor)
    assert made(sizes) is sizes and made(None, as_numpy=True) is None


@pytest.mark.parametrize("compiled", [True, False])
def test_helpers_are_made_only_where_they_are_missing(
    rows: dict[str, Patch], monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    made = list[int]()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if compiled else None)
    rows["compile_helpers"].make(lambda: made.append(1))()
    assert made == ([] if compiled else [1])


def test_the_makefile_of_a_checkout_builds_for_this_interpreter(rows: dict[str, Patch], tmp_path: Path) -> None:
    """Its ``python3-config`` is that of the system, and its ``python3`` too where no environment is activated."""
    lines = ("LIBEXT = of-the-system", "all:", "\t@echo $(LIBEXT) `python3 -c 'import sys; print(sys.prefix)'` > made")
    (tmp_path / "Makefile").write_text("\n".join(lines) + "\n")
    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as absent:
        absent.setattr(importlib.util, "find_spec", lambda name: None)
        rows["compile_helpers"].make(lambda: subprocess.run(["make", "-C", str(tmp_path)], check=True))()
    assert (tmp_path / "made").read_text().split() == [sysconfig.get_config_var("EXT_SUFFIX"), sys.prefix]
    assert dict(os.environ) == before


@pytest.mark.parametrize(("argv", "asked"), [(["x", "--help"], True), (["x", "-h"], True), (["x", "--lr", "1"], False)])
def test_megatrons_sources_are_parsed_for_help_texts_only_when_help_is_asked_for(
    rows: dict[str, Patch], monkeypatch: pytest.MonkeyPatch, argv: list[str], asked: bool
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    made = rows["_get_field_docstrings"].make(lambda kind: {"lr": "the rate"})
    assert made(dict) == ({"lr": "the rate"} if asked else {})


def test_initialize_parses_first_and_then_runs_the_replacement_that_parsing_put_in_place(
    rows: dict[str, Patch], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = importlib.import_module("megatron.training.initialize")
    calls = list[tuple[str, Any]]()

    def original(extra_args_provider: Any = None, allow_no_cuda: bool = False, parsed_args: Any = None) -> None:
        calls.append(("megatron's", (allow_no_cuda, parsed_args)))

    def replacement(extra_args_provider: Any = None, allow_no_cuda: bool = False, parsed_args: Any = None) -> None:
        calls.append(("elastic", (allow_no_cuda, parsed_args)))

    made = rows["initialize_megatron"].make(original)
    monkeypatch.setattr(home, "initialize_megatron", made)
    monkeypatch.setattr(home, "parse_args", lambda *_: "parsed")
    made()
    monkeypatch.setattr(home, "parse_args", lambda *_: setattr(home, "initialize_megatron", replacement) or "elastic's")
    made()
    made(parsed_args="given")
    assert calls == [
        ("megatron's", (True, "parsed")),
        ("elastic", (True, "elastic's")),
        ("megatron's", (True, "given")),
    ]
