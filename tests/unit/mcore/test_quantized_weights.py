"""Layers that quantize weights are told of new values, by the attribute that Megatron and Transformer Engine read."""

from __future__ import annotations

import ast
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megatron.elastic.mcore.model.quantized_weights import kept_bytes, quantize_anew
from megatron.elastic.state.layout import ParamSpec
from tests.wheels import newest

ATTRIBUTE = "is_first_microbatch"


def test_only_layers_that_keep_copies_are_told() -> None:
    keeps, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    keeps.is_first_microbatch = False  # type: ignore[assignment]
    quantize_anew([torch.nn.Sequential(keeps, other)])
    assert keeps.is_first_microbatch is True
    assert not hasattr(other, ATTRIBUTE)


def test_copies_are_counted_of_the_matrices_of_linear_layers_alone() -> None:
    kept = {
        ("self_attention.linear_qkv.weight", (6, 4)): 48,
        ("mlp.linear_fc2.weight", (4, 8)): 64,
        ("mlp.linear_fc1.layer_norm_weight", (4,)): 0,
        ("mlp.linear_fc2.bias", (4,)): 0,
        ("embedding.word_embeddings.weight", (9, 4)): 0,
        ("output_layer.weight", (9, 4)): 0,
    }
    found = {(name, shape): kept_bytes(ParamSpec(name, math.prod(shape), shape, True)) for name, shape in kept}
    assert found == kept


def test_megatrons_layers_of_transformer_engine_have_the_attribute() -> None:
    """Each class sets it when it is built and clears it after a forward."""
    spec = find_spec("megatron.core.extensions")
    assert spec is not None and spec.submodule_search_locations
    source = ast.parse((Path(spec.submodule_search_locations[0]) / "transformer_engine.py").read_text())
    values = {
        (node.name, statement.value.value)
        for node in ast.walk(source)
        if isinstance(node, ast.ClassDef)
        for statement in ast.walk(node)
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        for target in statement.targets
        if isinstance(target, ast.Attribute) and target.attr == ATTRIBUTE
    }
    assert values >= {
        (name, value) for name in ("TELinear", "TELayerNormColumnParallelLinear") for value in (True, False)
    }


@pytest.mark.parametrize("module", ["linear", "layernorm_linear", "grouped_linear"])
def test_transformer_engine_takes_its_copy_anew_in_a_first_micro_batch(module: str) -> None:
    """Whether a copy is made anew is ``is_first_microbatch is None or is_first_microbatch``."""
    with newest("transformer-engine") as archive:
        source = ast.parse(archive.read(f"transformer_engine/pytorch/module/{module}.py"))
    wanted = f"{ATTRIBUTE} is None or {ATTRIBUTE}"
    assert wanted in {ast.unparse(node) for node in ast.walk(source) if isinstance(node, ast.BoolOp)}


def test_transformer_engine_has_the_recipes_that_are_elastic() -> None:
    with newest("transformer-engine") as archive:
        source = ast.parse(archive.read("transformer_engine/common/recipe/__init__.py"))
    classes = {node.name for node in source.body if isinstance(node, ast.ClassDef)}
    assert {"Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"} <= classes
