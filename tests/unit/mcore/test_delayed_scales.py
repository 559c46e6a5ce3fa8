"""Layers of Transformer Engine, as its newest wheel has them, have the buffers that the engine reads and writes."""

from __future__ import annotations

import ast
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron.elastic.config import ConfigError
from megatron.elastic.mcore.model import delayed_scales
from tests.wheels import newest


def source(path: str) -> ast.Module:
    """A module of Transformer Engine's wheel."""
    with newest("transformer-engine") as archive:
        return ast.parse(archive.read(f"transformer_engine/pytorch/{path}"))


def function(module: ast.Module, kind: str, name: str) -> ast.FunctionDef:
    """Method ``name`` of class ``kind``."""
    [found] = [
        method
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name == kind
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == name
    ]
    return found


def test_a_layer_that_is_not_registered_gets_no_new_scales(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The patched method alone fills the buffers, and the update loops over one of them."""
    (tmp_path / "transformer_engine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    [(symbol, _, make)] = delayed_scales.rows(Namespace(fp8="hybrid", fp8_recipe="delayed"))
    package, _, rest = symbol.partition(".pytorch.fp8.")
    kind, _, name = rest.partition(".")
    assert package == "transformer_engine"
    module = source("quantization.py")
    assert function(module, kind, name).args.args[0].arg == "cls"
    exported = {
        alias.name for node in source("fp8.py").body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert kind in exported
    [loop] = [
        node
        for node in ast.walk(function(module, kind, "reduce_and_update_fp8_tensors"))
        if isinstance(node, ast.For) and "global_amax_buffer" in ast.unparse(node.iter)
    ]
    assert ast.unparse(loop.iter).endswith(".global_amax_buffer.items()")
    writes = {
        method.name
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name == kind
        for method in node.body
        if isinstance(method, ast.FunctionDef) and "global_amax_buffer[" in ast.unparse(method)
    }
    assert writes == {name}
    assert make(print)({}) is None


def test_a_stage_without_layers_is_refused() -> None:
    args = Namespace(fp8="hybrid", fp8_recipe="delayed")
    with pytest.raises(ConfigError, match=r"each stage needs layers.* they have none: use --fp8-recipe tensorwise"):
        delayed_scales.delayed_scaling(args, [torch.nn.Linear(2, 2)])


@pytest.mark.parametrize("args", [Namespace(fp8=None), Namespace(fp8="hybrid", fp8_recipe="tensorwise")])
def test_other_recipes_have_no_such_scales(args: Namespace) -> None:
    assert delayed_scales.delayed_scaling(args, [torch.nn.Linear(2, 2)]) is None
    assert not delayed_scales.rows(args)


def test_a_product_has_three_tensors_forward_and_two_backward() -> None:
    wanted = f"num_fp8_tensors = self.fp8_meta['num_gemms'] * {delayed_scales._FORWARD} if fwd else "
    wanted += f"self.fp8_meta['num_gemms'] * {delayed_scales._BACKWARD}"
    text = ast.unparse(function(source("module/base.py"), "TransformerEngineBaseModule", "set_meta_tensor"))
    assert wanted in text
    assert all(f"fp8_meta['{name}']" in ast.unparse(source("module/base.py")) for name in delayed_scales._BUFFERS)


def test_kernels_note_the_largest_value_in_row_0_and_read_the_scale_in_place() -> None:
    """A quantizer keeps views of both, so writing them in place is enough."""
    text = ast.unparse(function(source("quantization.py"), "DelayedScalingRecipeState", "make_quantizers"))
    assert "Float8Quantizer(self.scale[i], self.amax_history[0][i].reshape((1,)), self.dtype)" in text


def test_buffers_made_ahead_are_kept_by_the_first_forward() -> None:
    """``init_fp8_metadata`` does nothing where it has run with the same recipe."""
    text = ast.unparse(function(source("module/base.py"), "TransformerEngineBaseModule", "init_fp8_metadata"))
    assert "if self.fp8_initialized and FP8GlobalStateManager.get_fp8_recipe() == _original_recipe:" in text
