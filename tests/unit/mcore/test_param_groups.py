"""Parameter groups have Megatron's learning rates and epsilons, also where these follow the width of the model."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from megatron.core.optimizer.optimizer_config import AdamOptimizerConfig, OptimizerConfig, SGDOptimizerConfig

from megatron.elastic.mcore.model.param_groups import GroupKeys, with_width

LR, EPS, WIDTH = 0.8, 1e-3, 4.0
WIDE = Namespace(use_mup=True, mup_width_mult=WIDTH)


def of(name: str, shape: tuple[int, ...], keys: GroupKeys, **marks: bool) -> tuple[float, float, float]:
    """Return the highest and lowest learning rate, and the epsilon, of a parameter."""
    parameter = torch.nn.Parameter(torch.zeros(shape))
    vars(parameter).update(marks)
    index = keys.key(name, parameter).index
    group = keys.param_groups()[index]
    return group["max_lr"], group["min_lr"], keys.epsilons()[index]


def made(config: OptimizerConfig, model: Namespace) -> GroupKeys:
    return GroupKeys(config, with_width(None, config, model))


def test_matrices_inside_the_model_have_rates_and_epsilons_by_its_width() -> None:
    keys = made(AdamOptimizerConfig(lr=LR, min_lr=LR / 10, adam_eps=EPS), WIDE)
    inside = of("decoder.layers.0.mlp.linear_fc1.weight", (2, 2), keys)
    assert inside == pytest.approx((LR / WIDTH, LR / 10 / WIDTH, EPS / WIDTH))
    assert of("decoder.layers.0.input_layernorm.weight", (2,), keys) == (LR, LR / 10, EPS)
    assert of("embedding.word_embeddings.weight", (2, 2), keys) == (LR, LR / 10, EPS)
    assert of("output_layer.weight", (2, 2), keys, is_embedding_parameter=True) == (LR, LR / 10, EPS)


def test_with_sgd_it_is_the_others_rates_that_follow_the_width() -> None:
    keys = made(SGDOptimizerConfig(lr=LR, min_lr=LR / 10), WIDE)
    assert of("decoder.layers.0.mlp.linear_fc1.weight", (2, 2), keys)[:2] == (LR, LR / 10)
    assert of("embedding.word_embeddings.weight", (2, 2), keys)[:2] == (LR * WIDTH, LR / 10 * WIDTH)


def test_without_it_all_have_the_flags_values() -> None:
    keys = made(AdamOptimizerConfig(lr=LR, min_lr=LR / 10, adam_eps=EPS), Namespace(use_mup=False))
    assert of("decoder.layers.0.mlp.linear_fc1.weight", (2, 2), keys) == (LR, LR / 10, EPS)
    assert set(keys.epsilons()) == {EPS}
